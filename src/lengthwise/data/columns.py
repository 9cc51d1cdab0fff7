"""The columns of prepared data: rows to a table of Arrow, and the record batches of files as arrays where they lie."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.data.dataset import NO_LOSS, TOO_LONG, sum_of_weights
from lengthwise.data.digests import ROW_DIGEST_BYTES, row_digest
from lengthwise.data.prepared import refuse
from lengthwise.data.sources import printable_name

if TYPE_CHECKING:
    from lengthwise.data.load import TokenRow

UNREADABLE = "unreadable"
KINDS = ("ids", "text", "pair", "chat", "empty", "bad", TOO_LONG, "refused", UNREADABLE)
_LISTS = ("input_ids", "labels", "weights")
_NO_IDS = np.empty(0, dtype=np.int32)
_COLUMNS = (
    "input_ids", "labels", "weights", "digest", "loss_tokens", "loss_weight", "largest_id", "kind", "error"
)  # fmt: skip


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


def table_of(rows: Iterable[TokenRow], origin: int, names: Sequence[str] | None) -> Any:
    """Return rows of one listing, whose number is `origin`, as a table of Arrow; names: of documents."""
    import pyarrow as pa

    found = list(zip(*map(_values, rows), strict=True)) or [()] * len(_COLUMNS)
    columns: dict[str, Sequence[Any]] = dict(zip(_COLUMNS, found, strict=True))
    number = len(columns["kind"])
    columns["origin"] = [origin] * number
    columns["name"] = [*map(printable_name, names or ()), *[None] * number][:number]
    return pa.table([_column(columns[field.name], field.type) for field in schema()], schema=schema())


def _column(values: Sequence[Any], kind: Any) -> Any:
    """Return values as a column: of numbers, texts, digests, or lists, an array a row and None where it is null."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(np.frombuffer(b"".join(values), np.uint8)), type=kind)
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    there = [row for row in values if row is not None]
    flat = np.concatenate([np.empty(0, dtype=kind.value_type.to_pandas_dtype()), *there])
    ends = np.cumsum([0, *(0 if row is None else len(row) for row in values)])
    mask = pa.array([row is None for row in values]) if len(there) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, kind.value_type), kind, mask=mask)


def _values(row: TokenRow) -> tuple[Any, ...]:
    kind = KINDS.index(row.kind if row.is_row else UNREADABLE)
    if row.tokens is None:
        error = row.error and json.dumps([row.error.where, row.error.expected, row.error.got, row.error.remedy])
        return _NO_IDS, None, None, bytes(ROW_DIGEST_BYTES), 0, 0.0, 0, kind, error
    labels = None if row.labels is None or np.array_equal(row.labels, row.tokens) else row.labels
    losses = len(row.tokens) - 1 if labels is None else int(np.count_nonzero(labels[1:] != NO_LOSS))
    weight = float(losses) if row.weights is None else sum_of_weights(row.weights)
    digest = row_digest(row.tokens, labels, row.weights)
    return row.tokens, labels, row.weights, digest, losses, weight, int(row.tokens.max()), kind, None


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
