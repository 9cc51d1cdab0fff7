"""Prepared data: a folder of memory-mapped Arrow files, opened without reading its tokens.

    lengthwise.json           what it is made from and how, the size of each Arrow file, digests
    rows-*.arrow              Arrow streams as `datasets` writes them, all rows in order: the columns of `schema`
    state.json, dataset_info.json   with which `datasets.load_from_disk` opens the folder

A row is read where it lies, and pages that are not used go when memory is short. Opening maps all files, so that a
folder that is replaced meanwhile changes no run, and compares what planning needs (lengths, losses) and the digests of
rows with their SHA-256; a row's tokens are compared with its digest when they are read.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from lengthwise.config.problems import shown
from lengthwise.core.errors import DataError
from lengthwise.core.files import found_at, read_json
from lengthwise.data.ahead import read_ahead
from lengthwise.data.dataset import TOO_LONG, NumberedRows, digest_of_parts, plain_weights, too_long, write_protect
from lengthwise.data.digests import ROW_DIGEST_BYTES, row_digest
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

NAME, PREPARED = "lengthwise.json", "lengthwise.prepared/1"
UNFINISHED = ".unfinished"
ENCODING = 1  # to be raised when the same text gets other ids or labels than before
AGAIN = "Delete the folder and prepare it again: lengthwise prepare (in the cache: start the run again)."
KINDS = ("ids", "text", "pair", "chat", "empty", "bad", TOO_LONG, "refused", "unreadable")
_BEFORE = "lengthwise-store.json"  # of versions that had files of their own
_LISTS = ("input_ids", "labels", "weights")
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_FromZero = Annotated[int, Field(ge=0)]
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def schema() -> Any:
    """Return the columns of a prepared folder, as pyarrow knows them.

    `labels` is null where they are the ids, `weights` where all are 0 or 1; a row that is left out has no ids. `kind`
    is a place in `KINDS`, `origin` the number of the listing; `name` is the path of a document, null for a line.
    """
    import pyarrow as pa

    kinds = {
        "input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32()), "weights": pa.list_(pa.float32()),
        "digest": pa.list_(pa.uint8(), ROW_DIGEST_BYTES), "loss_tokens": pa.int64(), "loss_weight": pa.float64(),
        "largest_id": pa.int32(), "kind": pa.int8(), "origin": pa.int32(), "name": pa.string(), "error": pa.string(),
    }  # fmt: skip
    return pa.schema(list(kinds.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokenizer:
    """What made tokens of texts; `template` is the digest of the chat template."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    digest: _Hex
    template: _Hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prepared folder. `fingerprint`: of sources, settings and tokenizer. `data`: the digest of all rows (`digests`).

    `tables`: the digest of lengths, tokens with a loss, what they weigh, and the rows' digests. `encoding`: the version
    of how texts become ids and labels here, beside the tokenizer. `kinds`: rows of each kind. `tokenizer`: None where
    no row is text. `largest_id` is in row `largest_id_row`. `origins`: the first row of each listing, and its label.
    `files`: the bytes of each Arrow file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal["lengthwise.prepared/1"] = PREPARED
    version: str
    encoding: int
    fingerprint: _Hex
    data: _Hex
    tables: _Hex
    rows: _FromZero
    tokens: _FromZero
    loss_tokens: _FromZero
    largest_id: _FromZero
    largest_id_row: _FromZero
    kinds: Mapping[str, _FromZero]
    skipped: Mapping[str, _FromZero]
    tokenizer: UsedTokenizer | None
    sources: tuple[Mapping[str, object], ...]
    origins: tuple[tuple[_FromZero, str], ...]
    files: Mapping[Annotated[str, Field(pattern=r"^rows-[0-9a-z_]+\.arrow$")], _FromZero]

    def to_json(self) -> str:
        """Return the text of its file, with the digest of its own values."""
        return signed(asdict(self))


_READER = TypeAdapter(Prepared)


def signed(values: Mapping[str, object]) -> str:
    """Return the text of these values with their digest, which a change would not fit."""
    rest = {key: value for key, value in values.items() if key != "sha256"}
    return json.dumps({**rest, "sha256": _digest_of(rest)}, indent=1) + "\n"


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def is_prepared(path: Path) -> bool:
    """Return whether a path is a folder of prepared data, whole or not, of this version or an earlier one."""
    return any((path / name).is_file() for name in (NAME, _BEFORE)) or (
        path.name.endswith(UNFINISHED) and path.is_dir()
    )


def prepared_with(path: Path) -> str | None:
    """Return the name of the tokenizer that a folder was prepared with; None for ids, and for what is not prepared."""
    if not (path / NAME).is_file():
        return None
    made = read_prepared(path).tokenizer
    return None if made is None else made.name


def read_prepared(folder: Path) -> Prepared:
    """Return what a folder of prepared data is, whose files are there and have their sizes.

    Raises DataError where it is not finished, of an earlier version or damaged.
    """
    path = folder / NAME
    if not path.is_file():
        if (folder / _BEFORE).is_file():
            remedy = f"Prepare it anew: lengthwise prepare SOURCES --out {folder} (delete this folder first)."
            expected = "data prepared by this version, Arrow files"
            raise DataError(str(folder), expected=expected, got=f"those of an earlier one ({_BEFORE})", remedy=remedy)
        remedy = "Finish it: give the command that was interrupted once more."
        raise DataError(str(folder), expected="prepared data", got="data that is being prepared", remedy=remedy)
    try:
        values = read_json(path)
        if not isinstance(values, dict) or values.get("schema") != PREPARED:
            raise ValueError(f"schema {shown(values.get('schema') if isinstance(values, dict) else None)}")
        if values.pop("sha256", None) != _digest_of(values):
            raise ValueError("values that its sha256 is not of: it was changed")
        found = _READER.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        got = f"{place} = {shown(first['input'])}: {first['msg']}"
        raise refuse(path, f"a description of prepared data, {PREPARED}", got) from None
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"a description of prepared data, {PREPARED}", f"{error}") from None
    for name, size in found.files.items():
        part = folder / name
        if (got := found_at(part)) != f"{size} bytes":
            raise refuse(part, f"the {size} bytes that were prepared", got)
    return found


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


class Columns:
    """The record batches of Arrow files, as arrays that lie where the files are mapped."""

    def __init__(self, paths: list[Path]) -> None:
        """Map files. DataError for one that is no Arrow stream of these columns; OSError for one that is gone."""
        import pyarrow as pa

        expected, tables, self.files = schema(), hashlib.sha256(), paths
        self.batches, self.paths = list[Any](), list[Path]()
        self._views = dict[int, tuple[list[_View], np.ndarray]]()  # of batches that were read, with digests
        for path in paths:
            try:
                with pa.ipc.open_stream(pa.memory_map(os.fspath(path))) as reader:
                    if not reader.schema.equals(expected):
                        raise pa.ArrowInvalid(f"columns {', '.join(reader.schema.names)}")
                    batches = [batch for batch in reader if batch.num_rows]
                for batch in batches:
                    batch.validate()
            except pa.ArrowInvalid as error:
                raise refuse(path, "an Arrow stream as it was prepared", " ".join(str(error).split())[:200]) from None
            self.batches += batches
            self.paths += [path] * len(batches)
        self.are_weighed = any(batch.column("weights").null_count < batch.num_rows for batch in self.batches)
        compared = ("input_ids", "digest", "loss_tokens", *(["loss_weight"] if self.are_weighed else []))
        for batch in self.batches:
            for name in compared:
                for buffer in batch.column(name).buffers()[: 2 if name in _LISTS else None]:
                    if buffer is not None:
                        tables.update(buffer)
        self.firsts = [0, *np.cumsum([batch.num_rows for batch in self.batches], dtype=np.int64).tolist()]
        self.tables = tables.hexdigest()

    def numbers(self, name: str) -> np.ndarray:
        """Return a column of numbers of all rows."""
        parts = [batch.column(name).to_numpy() for batch in self.batches]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each row, int64."""
        parts = [np.diff(batch.column("input_ids").offsets.to_numpy()) for batch in self.batches]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def batch_digests(self, number: int) -> np.ndarray:
        """Return the digests of the rows of a batch, uint8 [rows, 16]."""
        return _digests(self.batches[number])

    def digests(self, first: int, last: int) -> np.ndarray:
        """Return the digests of rows [first, last), uint8 [last - first, 16]."""
        found = [np.empty((0, ROW_DIGEST_BYTES), dtype=np.uint8)]
        for start, batch in zip(self.firsts, self.batches, strict=False):
            begin, end = max(first - start, 0), min(last - start, batch.num_rows)
            if begin < end:
                found.append(_digests(batch)[begin:end])
        return np.concatenate(found)

    def place(self, row: int) -> tuple[int, int]:
        """Return the number of the batch that has a row, and the row's place in it."""
        number = bisect.bisect_right(self.firsts, row) - 1
        return number, row - self.firsts[number]

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return views of ids, labels and weights of a row; None for what is null."""
        number, place = self.place(row)
        ids, labels, weights = (view.entry(place) for view in self._of(number)[0])
        assert ids is not None, f"row {row} without a list of ids"
        return ids, labels, weights

    def digest(self, row: int) -> bytes:
        """Return the digest that was written for a row."""
        number, place = self.place(row)
        return self._of(number)[1][place].tobytes()

    def _of(self, number: int) -> tuple[list[_View], np.ndarray]:
        if number not in self._views:
            batch = self.batches[number]
            self._views[number] = [_View.of(batch.column(name)) for name in _LISTS], _digests(batch)
        return self._views[number]

    def text(self, row: int, name: str) -> str | None:
        """Return the text of a row in a column, None where it is null."""
        number, place = self.place(row)
        return self.batches[number].column(name)[place].as_py()


@dataclass(frozen=True, slots=True)
class _View:
    """A column of lists: where each begins, all values, and which are there (None: all, or none where `values` is)."""

    offsets: np.ndarray
    values: np.ndarray | None
    there: np.ndarray | None

    @staticmethod
    def of(column: Any) -> _View:
        values = None if column.null_count == len(column) else column.values.to_numpy()
        there = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
        return _View(column.offsets.to_numpy(), values, there)

    def entry(self, place: int) -> np.ndarray | None:
        if self.values is None or (self.there is not None and not self.there[place]):
            return None
        return self.values[self.offsets[place] : self.offsets[place + 1]]


def _digests(batch: Any) -> np.ndarray:
    return batch.column("digest").values.to_numpy().reshape(-1, ROW_DIGEST_BYTES)


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
    """Return what differs between the tokenizer of a run and the one that data was prepared with."""
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


def refuse(path: Path, expected: str, got: str, remedy: str = AGAIN) -> DataError:
    """Return the error for prepared data that cannot be used."""
    return DataError(str(path), expected=expected, got=got, remedy=remedy)
