"""Prepared data: a folder of memory-mapped Arrow files, opened without reading its tokens.

    lengthwise.json           what it is made from and how, the size of each Arrow file, digests (`prepared`)
    rows-*.arrow              Arrow streams as `datasets` writes them, all rows in order (`columns`)
    state.json, dataset_info.json   with which `datasets.load_from_disk` opens the folder

A row is read where it lies, and pages that are not used go when memory is short. Opening maps all files, so that a
folder that is replaced meanwhile changes no run, and compares what planning needs (lengths, losses) and the digests of
rows with their SHA-256; a row's tokens are compared with its digest when they are read.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.columns import Columns
from lengthwise.data.dataset import TOO_LONG, NumberedRows, digest_of_parts, plain_weights, too_long, write_protect
from lengthwise.data.digests import row_digest
from lengthwise.data.prepared import ENCODING, Prepared, UsedTokenizer, read_prepared, refuse
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource


def open_prepared(
    source: DataSource,
    *,
    key: str,
    tokenizer: Callable[[], Tokenizer] | None,
    vocab_size: int | None,
    report: Callable[[DataError], None],
) -> ArrowDataset | None:
    """Open the prepared folder that a source names; what it cannot serve is reported, and None returned.

    `tokenizer` is called where some rows were texts; None takes those of any. `vocab_size` None: ids of any size.
    """
    assert source.path is not None, "prepared data has a path"
    folder, refused = source.path, list[DataError]()
    try:
        made = read_prepared(folder)
        dataset = ArrowDataset(folder, made, key=key, max_tokens=source.max_tokens, weight=source.weight)
    except DataError as error:
        report(error)
        return None
    except OSError as error:  # it is being replaced
        report(refuse(Path(error.filename or folder), "a file that stays there", error.strerror or str(error)))
        return None
    if tokenizer is not None and made.tokenizer is not None:
        refused += _other_tokenizer(folder, made, made.tokenizer, tokenizer())
    if made.encoding != ENCODING:
        refused.append(refuse(folder, f"encoding {ENCODING}", f"{made.encoding}, of lengthwise {made.version}"))
    if vocab_size is not None and made.largest_id >= vocab_size:
        row = made.largest_id_row
        got = f"id {made.largest_id} in row {row} ({dataset.name(row)})"
        remedy = "Take the model that this was prepared for, or prepare it with its tokenizer."
        refused.append(DataError(str(folder), expected=f"ids below the model's {vocab_size}", got=got, remedy=remedy))
    refused += _other_limits(folder, made, source, dataset, key)
    for error in refused:
        report(error)
    return None if refused else dataset


class ArrowDataset(NumberedRows):
    """A `Dataset` on the disk. Memory: 24 bytes a row; where some rows have weights of their own, 8 more."""

    def __init__(self, folder: Path, made: Prepared, *, key: str, max_tokens: int | None, weight: float) -> None:
        """Map a folder whose sizes are right (`read_prepared`).

        Raises:
            DataError: what has no tokens is not what was prepared.
            OSError: a file is gone.
        """
        self._made, self._key, self.weights = made, key, ((0, weight),)
        self._columns = columns = Columns([folder / name for name in made.files])
        if columns.tables != made.tables:
            raise refuse(folder, f"columns of SHA-256 {made.tables[:16]}..., as they were prepared", "others")
        self.lengths = self._stored_lengths = columns.lengths
        self.loss_tokens = columns.numbers("loss_tokens")
        self.loss_weights = columns.numbers("loss_weight") if columns.are_weighed else self.loss_tokens
        self.skipped: Mapping[str, int] = made.skipped
        self.too_long = np.flatnonzero(self.lengths > max_tokens) if max_tokens is not None else self.lengths[:0]
        if len(self.too_long):
            self.lengths = self.lengths.copy()
            self.lengths[self.too_long] = self.loss_tokens[self.too_long] = self.loss_weights[self.too_long] = 0
            self.skipped = Counter(made.skipped) + Counter({TOO_LONG: len(self.too_long)})
        self.ids = np.flatnonzero(self.lengths).astype(np.int64, copy=False)
        self._checked = -1  # the row that was read last: its labels are asked for after its ids
        write_protect(self.lengths, self._stored_lengths, self.loss_tokens, self.loss_weights, self.ids)

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of ids and labels of tokens [start, stop) of a row, int32 [stop - start] each."""
        ids, labels, _ = self._read_row(row)
        return ids[start:stop], (ids if labels is None else labels)[start:stop]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return the weights of tokens [start, stop) of a row, float32 [stop - start], where any row has some."""
        if not self._columns.are_weighed:
            return None
        ids, labels, weights = self._read_row(row)
        return (
            plain_weights((ids if labels is None else labels)[start:stop]) if weights is None else weights[start:stop]
        )

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Begin to read rows: all of each, as its digest is of all."""
        for row in dict.fromkeys(row for row, _, _ in spans):
            for values in self._columns.row(row):
                if values is not None:
                    read_ahead(values)

    def _read_row(self, row: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return views of ids, labels and weights of a row; DataError where they are not what was prepared."""
        self.check_row(row)
        ids, labels, weights = self._columns.row(row)
        if not self.lengths[row]:
            return ids[:0], None, None
        if row != self._checked:
            if (error := wrong_row(self._columns, row, self.name)) is not None:
                raise error
            self._checked = row
        return ids, labels, weights

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]."""
        found = self._columns.digests(first, last)
        return np.where((self.lengths[first:last] > 0)[:, None], found, np.uint8(0)) if len(self.too_long) else found

    def digest(self) -> bytes:
        """Return the digest of all rows, the same wherever they lie: as it was written, or of what is not left out."""
        return digest_of_parts(self) if len(self.too_long) else bytes.fromhex(self._made.data)

    def name(self, row: int) -> str:
        """Return where a row was before it was prepared: `train.jsonl:3`, or the file's path inside its folder."""
        self.check_row(row)
        origins = self._made.origins
        first, label = origins[bisect.bisect_right(origins, row, key=lambda each: each[0]) - 1]
        return self._columns.text(row, "name") or f"{label}:{row - first + 1}"

    def source_key(self, row: int) -> str:
        """Return the config path of the source that names the folder: `data.0`."""
        del row
        return self._key

    def stored_length(self, row: int) -> int:
        """Return the tokens of a row, also of one that `max_tokens` leaves out."""
        return int(self._stored_lengths[row])


def wrong_row(columns: Columns, row: int, name: Callable[[int], str]) -> DataError | None:
    """Return the error for a row whose ids, labels or weights are not those that its digest is of."""
    if row_digest(*columns.row(row)) == columns.digest(row):
        return None
    expected = f"row {row} ({name(row)}) as it was prepared"
    return refuse(columns.paths[columns.place(row)[0]], expected, "other ids, labels or weights")


def wrong_rows(folder: Path, on_rows: Callable[[int], None]) -> Iterator[DataError]:
    """Read every row of a prepared folder; yield an error for the first of each file that is not what was written.

    `on_rows` gets how many rows were read, from time to time.
    """
    made = read_prepared(folder)
    dataset, named = ArrowDataset(folder, made, key="", max_tokens=None, weight=1.0), set[Path]()
    for row in range(made.rows):
        error = wrong_row(dataset._columns, row, dataset.name)
        if error is not None and Path(error.where) not in named:
            named.add(Path(error.where))
            yield error
        if row % 1000 == 0:
            on_rows(row)


def _other_tokenizer(folder: Path, made: Prepared, its: UsedTokenizer, tokenizer: Tokenizer) -> list[DataError]:
    found = []
    for what, is_used, ours, theirs in (
        ("tokenizer", True, tokenizer.digest(), its.digest),
        ("chat template", made.kinds.get("chat", 0) > 0, tokenizer.template_digest(), its.template),
    ):
        if is_used and ours != theirs:
            expected = f"the {what} of {tokenizer.name} (digest {ours[:16]})"
            remedy = f"Prepare it again with that one, or set {{tokenizer|`tokenizer`}} to {its.name} as it was."
            got = f"one prepared with that of {its.name} (digest {theirs[:16]})"
            found.append(DataError(str(folder), expected=expected, got=got, remedy=remedy))
    return found


def _other_limits(folder: Path, made: Prepared, source: DataSource, dataset: ArrowDataset, key: str) -> list[DataError]:
    """Return what a source asks for and preparing has left out, and rows that the source does not take."""
    limits = [each.get("max_tokens") for each in made.sources]
    least = min((limit for limit in limits if isinstance(limit, int)), default=None)
    left_out = made.skipped.get(TOO_LONG, 0)
    if source.max_tokens is not None and left_out and least is not None and source.max_tokens > least:
        remedy = f"Set {key}.max_tokens: {least}, take it out, or prepare the data again without that limit."
        got = f"prepared data that left out {left_out} rows of more than {least}"
        return [refuse(folder, f"rows of up to max_tokens {source.max_tokens}", got, remedy)]
    if source.too_long == "skip" or source.max_tokens is None:
        return []
    rows = [int(row) for row in dataset.too_long]
    return [too_long(dataset.name(row), dataset.stored_length(row), source.max_tokens, key) for row in rows]


def read_ahead(values: np.ndarray) -> None:
    """Begin to read what `values`, a view of a mapped file, needs from the disk; nothing where the system cannot."""
    if not values.size or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = values.ctypes.data
    start = first - first % mmap.PAGESIZE
    advise(start, first + values.nbytes - start)


def advise(start: int, num_bytes: int) -> None:
    """Ask the system for mapped pages; a hint, without which the first to read waits."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_WILLNEED)
