"""Prepared data: a folder of memory-mapped Arrow files, opened without reading its tokens.

    lengthwise.json     sources, settings, tokenizer, sizes of the files, digests (`prepared`)
    the other files     what `datasets.save_to_disk` writes: Arrow streams, all rows in order

Files are mapped: the system drops unused pages if memory is short. Opening maps all files, so a folder that is
replaced later changes no run, and compares lengths, losses and row digests with their SHA-256. Reading a row compares
its tokens with its digest.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import TOO_LONG, RowArrays, write_protect
from lengthwise.data.digests import ROW_DIGEST_BYTES, row_digest
from lengthwise.data.image_files import ImageFile
from lengthwise.data.prepared import Prepared, read_prepared, refuse
from lengthwise.data.tokens import TokenRow

KINDS = ("ids", "text", "pair", "chat", "empty", "bad", TOO_LONG, "refused")
_LISTS = ("input_ids", "labels", "weights")
_NO_IDS = np.empty(0, dtype=np.int32)


def schema() -> Any:
    """Return the columns of a prepared folder, as a pyarrow schema.

    `labels` is null if they are the ids, `weights` if all are 0 or 1; a row that is left out has no ids. `kind` is an
    index into `KINDS`, `name` the path of a document, null for a line, `images` JSON, null without any.
    """
    import pyarrow as pa

    kinds = {
        "input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32()), "weights": pa.list_(pa.float32()),
        "digest": pa.list_(pa.uint8(), ROW_DIGEST_BYTES), "loss_tokens": pa.int64(), "loss_weight": pa.float64(),
        "largest_id": pa.int32(), "kind": pa.int8(), "name": pa.string(), "error": pa.string(),
        "images": pa.string(),
    }  # fmt: skip
    return pa.schema(list(kinds.items()))


def table_of(rows: Sequence[TokenRow]) -> Any:
    """Return rows as an Arrow table."""
    import pyarrow as pa

    found = list(zip(*map(_values, rows), strict=True)) or [()] * len(schema())
    return pa.table(
        [_column(values, field.type) for values, field in zip(found, schema(), strict=True)], schema=schema()
    )


def _column(values: Sequence[Any], kind: Any) -> Any:
    """Return values as a column: a list is an array per row, None is null."""
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
    kind, name, error = KINDS.index(row.kind), row.name if row.is_document else None, row.error
    if row.tokens is None:
        said = error and json.dumps([error.where, error.expected, error.got, error.remedy])
        return _NO_IDS, None, None, row.digest, 0, 0.0, 0, kind, name, said, None
    images = json.dumps(row.images) if row.images else None
    return *row.arrays, row.digest, *row.losses, int(row.tokens.max()), kind, name, None, images


class Columns:
    """The record batches of Arrow files, as arrays in the mapped files."""

    def __init__(self, paths: list[Path]) -> None:
        """Map files. DataError if one is no Arrow stream of these columns, OSError if one is gone."""
        import pyarrow as pa

        expected, self.files = schema(), paths
        without_images = expected.remove(expected.get_field_index("images"))  # of earlier versions
        self.batches, self.paths = list[Any](), list[Path]()
        self._views = dict[int, tuple[list[_View], np.ndarray]]()  # of batches read so far, with their digests
        for path in paths:
            try:
                with pa.ipc.open_stream(pa.memory_map(os.fspath(path))) as reader:
                    if not (reader.schema.equals(expected) or reader.schema.equals(without_images)):
                        raise pa.ArrowInvalid(f"columns {', '.join(reader.schema.names)}")
                    batches = [batch for batch in reader if batch.num_rows]
                for batch in batches:
                    batch.validate()
            except pa.ArrowInvalid as error:
                raise refuse(path, "an Arrow stream as it was prepared", " ".join(str(error).split())[:200]) from None
            self.batches += batches
            self.paths += [path] * len(batches)
        self.are_weighed = any(batch.column("weights").null_count < batch.num_rows for batch in self.batches)
        self.firsts = [0, *np.cumsum([batch.num_rows for batch in self.batches], dtype=np.int64).tolist()]
        self.first_with_images = self._first_with_images()
        weights = self.numbers("loss_weight") if self.are_weighed else self.lengths[:0]
        self.tables = _digest_of(self.lengths, *map(_digests, self.batches), self.numbers("loss_tokens"), weights)

    def numbers(self, name: str) -> np.ndarray:
        """Return a column of numbers, of all rows."""
        parts = [batch.column(name).to_numpy() for batch in self.batches]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each row, int64."""
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
        """Return (batch number, place in the batch) of a row."""
        number = bisect.bisect_right(self.firsts, row) - 1
        return number, row - self.firsts[number]

    def row(self, row: int) -> RowArrays:
        """Return views of the ids, labels and weights of a row; None if null."""
        number, place = self.place(row)
        ids, labels, weights = (view.entry(place) for view in self._of(number)[0])
        assert ids is not None, f"row {row} without a list of ids"
        return ids, labels, weights

    def images(self, row: int) -> Sequence[ImageFile]:
        """Return the images of a row."""
        text = self.text(row, "images") if self.first_with_images is not None else None
        return [
            ImageFile(path, content, (rows, columns)) for path, content, (rows, columns) in json.loads(text or "[]")
        ]

    def _first_with_images(self) -> int | None:
        for first, batch in zip(self.firsts, self.batches, strict=False):
            if "images" in batch.schema.names and batch.column("images").null_count < batch.num_rows:
                return first + int(np.flatnonzero(batch.column("images").is_valid().to_numpy(zero_copy_only=False))[0])
        return None

    def digest(self, row: int) -> bytes:
        """Return the stored digest of a row."""
        number, place = self.place(row)
        return self._of(number)[1][place].tobytes()

    def _of(self, number: int) -> tuple[list[_View], np.ndarray]:
        if number not in self._views:
            batch = self.batches[number]
            self._views[number] = [_View.of(batch.column(name)) for name in _LISTS], _digests(batch)
        return self._views[number]

    def text(self, row: int, name: str) -> str | None:
        """Return the text of a row in a column; None if null."""
        number, place = self.place(row)
        batch = self.batches[number]
        return batch.column(name)[place].as_py() if name in batch.schema.names else None


@dataclass(frozen=True, slots=True)
class _View:
    """A column of lists. values: None if all lists are null. there: which lists are not null; None if all or none."""

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


def _digest_of(*columns: np.ndarray) -> str:
    found = hashlib.sha256()
    for column in columns:
        found.update(np.ascontiguousarray(column).data)
    return found.hexdigest()


def _digests(batch: Any) -> np.ndarray:
    return batch.column("digest").values.to_numpy().reshape(-1, ROW_DIGEST_BYTES)


class ArrowRows:
    """`StoredRows` on the disk. Memory: 24 bytes a row, 8 more if some rows have weights of their own."""

    def __init__(self, folder: Path, made: Prepared, *, key: str, max_tokens: int | None, weight: float) -> None:
        """Map a folder whose sizes `read_prepared` has checked. DataError: the columns without tokens have changed."""
        self._made, self._key, self.firsts = made, key, ((0, weight),)
        self.columns = columns = Columns([folder / name for name in made.files])
        if columns.tables != made.tables:
            raise refuse(folder, f"columns of SHA-256 {made.tables[:16]}..., as they were prepared", "others")
        self.lengths = self._stored_lengths = columns.lengths
        self.loss_tokens, self.first_with_images = columns.numbers("loss_tokens"), columns.first_with_images
        self.loss_weights = columns.numbers("loss_weight") if columns.are_weighed else self.loss_tokens
        self.skipped: Mapping[str, int] = made.skipped
        self.too_long = np.flatnonzero(self.lengths > max_tokens) if max_tokens is not None else self.lengths[:0]
        self.digest = None if len(self.too_long) else bytes.fromhex(made.data)
        if len(self.too_long):
            self.lengths = self.lengths.copy()
            self.lengths[self.too_long] = self.loss_tokens[self.too_long] = self.loss_weights[self.too_long] = 0
            self.skipped = Counter(made.skipped) + Counter({TOO_LONG: len(self.too_long)})
        self._checked = -1  # last row read: its labels are read after its ids
        write_protect(self._stored_lengths)

    def row(self, row: int) -> RowArrays:
        """Return views of the ids, labels and weights of a row; DataError if they differ from those prepared."""
        ids, labels, weights = self.columns.row(row)
        if not self.lengths[row]:
            return ids[:0], None, None
        if row != self._checked:
            if (error := wrong_row(self.columns, row, self.name)) is not None:
                raise error
            self._checked = row
        return ids, labels, weights

    def images(self, row: int) -> Sequence[ImageFile]:
        return self.columns.images(row)

    def read_ahead(self, row: int) -> None:
        for values in self.columns.row(row):
            if values is not None:
                read_ahead(values)

    def row_digests(self, first: int, last: int) -> np.ndarray:
        found = self.columns.digests(first, last)
        return np.where((self.lengths[first:last] > 0)[:, None], found, np.uint8(0)) if len(self.too_long) else found

    def name(self, row: int) -> str:
        origins = self._made.origins
        first, label = origins[bisect.bisect_right(origins, row, key=lambda each: each[0]) - 1]
        return self.columns.text(row, "name") or f"{label}:{row - first + 1}"

    def source_key(self, row: int) -> str:
        del row
        return self._key

    def stored_length(self, row: int) -> int:
        """Return the number of tokens of a row, even if `max_tokens` leaves it out."""
        return int(self._stored_lengths[row])


def wrong_row(columns: Columns, row: int, name: Callable[[int], str]) -> DataError | None:
    """Return the error for a row that does not match its digest; None if it does."""
    images = (each.identity for each in columns.images(row))
    if row_digest(*columns.row(row), images) == columns.digest(row):
        return None
    expected = f"row {row} ({name(row)}) as it was prepared"
    return refuse(columns.paths[columns.place(row)[0]], expected, "other ids, labels or weights")


def wrong_rows(folder: Path, on_rows: Callable[[int], None]) -> Iterator[DataError]:
    """Read every row of a prepared folder; yield an error for the first wrong row of each file.

    on_rows: function that is called now and then with the number of rows read.
    """
    made = read_prepared(folder)
    rows, named = ArrowRows(folder, made, key="", max_tokens=None, weight=1.0), set[Path]()
    for row in range(made.rows):
        error = wrong_row(rows.columns, row, rows.name)
        if error is not None and Path(error.where) not in named:
            named.add(Path(error.where))
            yield error
        if row % 1000 == 0:
            on_rows(row)


def read_ahead(values: np.ndarray) -> None:
    """Begin to read the pages of `values`, a view of a mapped file, if the system can."""
    if not values.size or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = values.ctypes.data
    start = first - first % mmap.PAGESIZE
    advise(start, first + values.nbytes - start)


def advise(start: int, num_bytes: int) -> None:
    """Ask the system to read mapped pages ahead."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_WILLNEED)
