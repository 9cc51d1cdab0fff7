"""Prepared data: a folder that `lengthwise prepare` wrote, opened without reading its tokens.

    lengthwise-store.json     what it is made from and how, and size and SHA-256 of all files below
    lengths.bin               tokens of each row, int64; 0 for one that is left out
    offsets.bin               int64 [rows + 1]: row r has tokens offsets[r] to offsets[r + 1] of all
    losses.bin                tokens with a loss of each row, int64
    weights.bin               what they weigh together in each row, float64; only where weights other than 0 and 1 are
    digests.bin               16 bytes a row, see `digests`
    files.jsonl               a line a source file: its path, size and SHA-256
    tokens-00000.bin          int32 ids of rows in order, then as many labels where they are not the ids, then as
                              many float32 weights where some are neither 0 nor 1

All numbers are little-endian, and every array is memory-mapped: a row is read where it lies, and pages that are not
used go when memory is short. Opening maps all files, so that a store that is replaced meanwhile changes no run, and
compares all but the tokens with their SHA-256; a row's tokens are compared with its digest when they are read.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.ahead import read_ahead
from lengthwise.data.dataset import TOO_LONG, NumberedRows, digest_of_parts, plain_weights, too_long, write_protect
from lengthwise.data.digests import ROW_DIGEST_BYTES, file_digest, row_digest
from lengthwise.data.manifest import AGAIN, NAME, Manifest, Shard, read_manifest
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

ENCODING = 1  # to be raised when the same text gets other ids or labels than before
LENGTHS, OFFSETS, LOSSES, DIGESTS, FILES = "lengths.bin", "offsets.bin", "losses.bin", "digests.bin", "files.jsonl"
WEIGHTS = "weights.bin"
ID_BYTES = 4
_ROW_BYTES = {LENGTHS: 8, OFFSETS: 8, LOSSES: 8, DIGESTS: ROW_DIGEST_BYTES}
UNFINISHED = ".unfinished"

Report = Callable[[DataError], None]


def is_store(path: Path) -> bool:
    """Return whether a path is a folder of prepared data, whole or not."""
    return (path / NAME).is_file() or (path.name.endswith(UNFINISHED) and path.is_dir())


def prepared_with(path: Path) -> str | None:
    """Return the name of the tokenizer that a store was made with; None for ids, and for what is no store."""
    if not (path / NAME).is_file():
        return None
    made = read_manifest(path).tokenizer
    return None if made is None else made.name


def open_store(
    source: DataSource, *, key: str, tokenizer: Callable[[], Tokenizer] | None, vocab_size: int | None, report: Report
) -> StoreDataset | None:
    """Open the store that a source names; what it cannot serve is reported, and None returned.

    `tokenizer` is called where some rows were texts; None takes those of any. `vocab_size` None: ids of any size.
    """
    assert source.path is not None, "a store has a path"
    folder, refused = source.path, list[DataError]()
    try:
        manifest = check_store(folder)
        store = StoreDataset(folder, manifest, key=key, max_tokens=source.max_tokens, weight=source.weight)
    except DataError as error:
        report(error)
        return None
    except OSError as error:  # it is being replaced
        report(_refuse(Path(error.filename or folder), "a file that stays there", error.strerror or str(error)))
        return None
    if tokenizer is not None and manifest.tokenizer is not None:
        refused += _other_tokenizer(folder, manifest, tokenizer())
    if manifest.encoding != ENCODING:
        refused.append(
            _refuse(folder, f"encoding {ENCODING}", f"{manifest.encoding}, of lengthwise {manifest.version}")
        )
    if vocab_size is not None and manifest.largest_id >= vocab_size:
        row = manifest.largest_id_row
        got = f"id {manifest.largest_id} in row {row} ({store.name(row)})"
        remedy = "Take the model that this was prepared for, or prepare it with its tokenizer."
        refused.append(DataError(str(folder), expected=f"ids below the model's {vocab_size}", got=got, remedy=remedy))
    refused += _other_limits(folder, manifest, source, store, key)
    for error in refused:
        report(error)
    return None if refused else store


def check_store(folder: Path) -> Manifest:
    """Return the manifest of a store whose files are there and have their sizes; DataError names one that has not."""
    if not (folder / NAME).is_file():
        remedy = "Finish it: give the command that was interrupted once more."
        raise DataError(str(folder), expected="a finished store", got="one that is being prepared", remedy=remedy)
    manifest = read_manifest(folder)
    expected = {name: each * (manifest.rows + (name == OFFSETS)) for name, each in _ROW_BYTES.items()}
    for shard in manifest.shards:
        expected[shard.file] = ID_BYTES * shard.tokens * (1 + shard.labels + shard.weights)
    if any(shard.weights for shard in manifest.shards):
        expected[WEIGHTS] = 8 * manifest.rows
    listed = {name: file.num_bytes for name, file in manifest.files.items() if name != FILES}
    sums = [sum(each.rows for each in manifest.shards), sum(each.tokens for each in manifest.shards)]
    if expected != listed or FILES not in manifest.files or sums != [manifest.rows, manifest.tokens]:
        raise _refuse(folder / NAME, "sizes that agree with each other", "others")
    for name, file in manifest.files.items():
        path = folder / name
        try:
            got = "a link" if path.is_symlink() else f"{path.stat().st_size} bytes"
        except OSError as error:
            got = error.strerror or str(error)
        if got != f"{file.num_bytes} bytes":
            raise _refuse(path, f"the {file.num_bytes} bytes that were prepared", got)
    return manifest


def broken_files(folder: Path, manifest: Manifest, on_file: Callable[[int], None]) -> list[DataError]:
    """Read every byte of a store and return an error for each file that is not what was written.

    `on_file` hears the bytes of each file when it has been read.
    """
    found = []
    for name, file in manifest.files.items():
        digest = file_digest(folder / name)
        if digest != file.sha256:
            got = f"{digest[:16]}..."
            found.append(_refuse(folder / name, f"SHA-256 {file.sha256[:16]}..., as it was prepared", got))
        on_file(file.num_bytes)
    return found


class StoreDataset(NumberedRows):
    """A `Dataset` on the disk. Memory: 8 bytes a row for ids; with rows that `max_tokens` leaves out, 16 more."""

    def __init__(self, folder: Path, manifest: Manifest, *, key: str, max_tokens: int | None, weight: float) -> None:
        """Map a store whose sizes are right (`check_store`).

        Raises:
            DataError: a file, of those that have no tokens, is not what was prepared.
            OSError: a file is gone.
        """
        self._folder, self._manifest, self._key = folder, manifest, key
        self.weights = ((0, weight),)
        self._shards = [self._map_shard(each) for each in manifest.shards]
        self._offsets = self._map_table(OFFSETS, "<i8")
        self._stored_lengths = self.lengths = self._map_table(LENGTHS, "<i8")
        self.loss_tokens = self._map_table(LOSSES, "<i8")
        weighed = any(shard.weights for shard in manifest.shards)
        self._loss_weights = self._map_table(WEIGHTS, "<f8") if weighed else None
        self._digests = self._map_table(DIGESTS, "u1").reshape(-1, ROW_DIGEST_BYTES)
        self._files = self._map_table(FILES, "u1")
        self._checked = -1  # the row that was read last: its labels are asked for after its ids
        self._shard_rows = [0, *np.cumsum([each.rows for each in manifest.shards]).tolist()]
        self._shard_tokens = [0, *np.cumsum([each.tokens for each in manifest.shards]).tolist()]
        self.skipped: Mapping[str, int] = manifest.skipped
        self.too_long = np.flatnonzero(self.lengths > max_tokens) if max_tokens is not None else self.lengths[:0]
        if len(self.too_long):
            self.lengths, self.loss_tokens = self.lengths.copy(), self.loss_tokens.copy()
            self.lengths[self.too_long] = self.loss_tokens[self.too_long] = 0
            if self._loss_weights is not None:
                self._loss_weights = self._loss_weights.copy()
                self._loss_weights[self.too_long] = 0
            self.skipped = Counter(manifest.skipped) + Counter({TOO_LONG: len(self.too_long)})
        self.ids = np.flatnonzero(self.lengths).astype(np.int64, copy=False)
        write_protect(self.lengths, self.loss_tokens, self._loss_weights, self.ids)

    @property
    def loss_weights(self) -> np.ndarray:
        """What the losses of each row's tokens weigh together."""
        return self.loss_tokens if self._loss_weights is None else self._loss_weights

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of ids and labels of tokens [start, stop) of a row, int32 [stop - start] each."""
        ids, labels, _ = self._read_row(row)
        return ids[start:stop], labels[start:stop]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return the weights of tokens [start, stop) of a row, float32 [stop - start], where the store has any."""
        if self._loss_weights is None:
            return None
        _, labels, weights = self._read_row(row)
        return plain_weights(labels[start:stop]) if weights is None else weights[start:stop]

    def read_ahead(self, row: int, start: int, stop: int) -> None:
        """Begin to read a row: all of it, as its digest is of all."""
        del start, stop
        _, *parts = self._place(row)
        for values in parts:
            if values is not None:
                read_ahead(values)

    def _read_row(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return views of ids, labels and weights of a row; DataError where they are not what was prepared."""
        shard, ids, labels, weights = self._place(row)
        if len(ids) and row != self._checked:
            if row_digest(ids, labels, weights) != self._digests[row].tobytes():
                where, expected = self._folder / shard.file, f"row {row} ({self.name(row)}) as it was prepared"
                raise _refuse(where, expected, "other ids, labels or weights")
            self._checked = row
        return ids, ids if labels is None else labels, weights

    def _place(self, row: int) -> tuple[Shard, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return the shard of a row, and views of the row's ids, of its labels and weights where the shard has any."""
        self.check_row(row)
        number = bisect.bisect_right(self._shard_rows, row) - 1
        first = int(self._offsets[row]) - self._shard_tokens[number]
        span = slice(first, first + int(self.lengths[row]))
        ids, labels, weights = self._shards[number]
        return (
            self._manifest.shards[number],
            ids[span],
            None if labels is None else labels[span],
            None if weights is None else weights[span],
        )

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]."""
        found = self._digests[first:last]
        if not len(self.too_long):
            return found
        return np.where((self.lengths[first:last] > 0)[:, None], found, np.uint8(0))

    def digest(self) -> bytes:
        """Return the digest of all rows, the same wherever they lie: as it was written, or of what is not left out."""
        return digest_of_parts(self) if len(self.too_long) else bytes.fromhex(self._manifest.data)

    def name(self, row: int) -> str:
        """Return where a row was before it was prepared: `train.jsonl:3`, or the file's path inside its folder."""
        self.check_row(row)
        origins = self._manifest.origins
        origin = origins[bisect.bisect_right(origins, row, key=lambda each: each.first_row) - 1]
        place = row - origin.first_row
        return self._document_names[origin.first_file + place] if origin.documents else f"{origin.label}:{place + 1}"

    def source_key(self, row: int) -> str:
        """Return the config path of the source that names the store: `data.0`."""
        del row
        return self._key

    def stored_length(self, row: int) -> int:
        """Return the tokens of a row, also of one that `max_tokens` leaves out."""
        return int(self._stored_lengths[row])

    @cached_property
    def _document_names(self) -> list[str]:
        return [json.loads(line)["path"] for line in self._files.tobytes().splitlines()]

    def _map_shard(self, shard: Shard) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Map ids of a shard, and labels and weights where it has any."""
        found, end = _mapped(self._folder / shard.file, "<i4"), shard.tokens * (1 + shard.labels)
        labels = found[shard.tokens : end] if shard.labels else None
        return found[: shard.tokens], labels, found[end:].view("<f4") if shard.weights else None

    def _map_table(self, name: str, kind: str) -> np.ndarray:
        """Map a file that has no tokens; DataError where it is not what was prepared."""
        values, sha256 = _mapped(self._folder / name, kind), self._manifest.files[name].sha256
        if hashlib.sha256(values.data).hexdigest() != sha256:
            raise _refuse(self._folder / name, f"SHA-256 {sha256[:16]}..., as it was prepared", "another")
        return values


def _mapped(path: Path, kind: str) -> np.ndarray:
    """Map a file as an array of numbers; one of no bytes cannot be mapped."""
    if not path.stat().st_size:
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))


def _other_tokenizer(folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> list[DataError]:
    """Return what differs between the tokenizer of a run and the one that a store was made with."""
    made = manifest.tokenizer
    assert made is not None, "asked of stores with texts"
    found = []
    for what, is_used, ours, its in (
        ("tokenizer", True, tokenizer.digest(), made.digest),
        ("chat template", manifest.kinds.get("chat", 0) > 0, tokenizer.template_digest(), made.template),
    ):
        if is_used and ours != its:
            expected = f"the {what} of {tokenizer.name} (digest {ours[:16]})"
            remedy = f"Prepare it again with that one, or set {{tokenizer|`tokenizer`}} to {made.name} as it was."
            got = f"one prepared with that of {made.name} (digest {its[:16]})"
            found.append(DataError(str(folder), expected=expected, got=got, remedy=remedy))
    return found


def _other_limits(
    folder: Path, manifest: Manifest, source: DataSource, store: StoreDataset, key: str
) -> list[DataError]:
    """Return what a source asks for and a store has left out, and rows that the source does not take."""
    limits = [each.get("max_tokens") for each in manifest.sources]
    least = min((each for each in limits if isinstance(each, int)), default=None)
    left_out = manifest.skipped.get(TOO_LONG, 0)
    if source.max_tokens is not None and left_out and least is not None and source.max_tokens > least:
        remedy = f"Set {key}.max_tokens: {least}, take it out, or prepare the data again without that limit."
        got = f"a store that left out {left_out} rows of more than {least}"
        return [_refuse(folder, f"rows of up to max_tokens {source.max_tokens}", got, remedy)]
    if source.too_long == "skip" or source.max_tokens is None:
        return []
    rows = [int(row) for row in store.too_long]
    return [too_long(store.name(row), store.stored_length(row), source.max_tokens, key) for row in rows]


def _refuse(path: Path, expected: str, got: str, remedy: str = AGAIN) -> DataError:
    return DataError(str(path), expected=expected, got=got, remedy=remedy)
