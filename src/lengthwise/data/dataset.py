"""The rows of a run: the `Dataset` protocol, and datasets of rows stored in memory or on the disk.

A row's id is its number over all sources; a row that is left out keeps its number, with length 0. Rows in memory are
one flat array of tokens and their offsets: 4 bytes a token, 8 a row.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lengthwise.data.digests import ROW_DIGEST_BYTES, ROWS_AT_ONCE, digest_of_rows, row_digest

if TYPE_CHECKING:
    from lengthwise.data.image_files import ImageFile

NO_LOSS = -100


class Dataset(Protocol):
    """Rows of tokens in any store. Arrays are read-only and have one entry per row."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]; 0 if the row is left out."""
        ...

    @property
    def loss_tokens(self) -> np.ndarray:
        """Number of tokens with a loss, int64 [rows]: position t predicts t + 1, so the first label never counts."""
        ...

    @property
    def loss_weights(self) -> np.ndarray:
        """Sum of the loss weights of each row, [rows]; equals `loss_tokens` if no token has a weight."""
        ...

    @property
    def ids(self) -> np.ndarray:
        """Numbers of the rows with tokens, ascending, int64."""
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """Number of rows left out, by reason, for messages."""
        ...

    @property
    def weights(self) -> tuple[tuple[int, float], ...]:
        """Per source, its first row and how often an epoch takes each of its rows: 1.0, 0.5, 3.0."""
        ...

    @property
    def first_with_images(self) -> int | None:
        """Number of the first row with images, or None."""
        ...

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of tokens [start, stop) of a row, int32 [stop - start] each.

        Labels are not shifted: entry i is the target for token start + i itself, `NO_LOSS` if it has no loss.
        """
        ...

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return loss weights of tokens [start, stop) of a row, aligned with labels, float32 [stop - start].

        None if all weights of all rows are 0 or 1, as the labels say.
        """
        ...

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Begin to read these (row, start, stop), and return at once."""
        ...

    def images(self, row: int) -> Sequence[ImageFile]:
        """Return the images of a row, in the order of their tokens."""
        ...

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return the digests of rows [first, last), uint8 [last - first, 16] (see `digests`)."""
        ...

    def digest(self) -> bytes:
        """Return a digest of all rows, 32 bytes, which ranks compare."""
        ...

    def name(self, row: int) -> str:
        """Return the place of a row, for messages: `train.jsonl:3`, or the path of a document."""
        ...

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        ...


def write_protect(*arrays: np.ndarray | None) -> None:
    """Make arrays read-only."""
    for values in arrays:
        if values is not None:
            values.flags.writeable = False


RowArrays = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""Ids, labels (None if they are the ids) and weights (None if all are 0 or 1) of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The origin of rows. names: one name per row; None names a row `label:line`."""

    key: str
    label: str
    first_row: int
    names: tuple[str, ...] | None
    weight: float = 1.0


class StoredRows(Protocol):
    """Rows of one store, numbered from 0, with arrays and methods as in `Dataset`.

    loss_weights: the array `loss_tokens` itself if all weights are 0 or 1. firsts: (first row, weight) of each source,
    ascending. digest: digest of all rows; None if it was not computed.
    """

    lengths: np.ndarray
    loss_tokens: np.ndarray
    loss_weights: np.ndarray
    skipped: Mapping[str, int]
    firsts: tuple[tuple[int, float], ...]
    digest: bytes | None
    first_with_images: int | None

    def row(self, row: int) -> RowArrays:
        """Return views of the ids, labels and weights of a row."""
        ...

    def images(self, row: int) -> Sequence[ImageFile]:
        """Return the images of a row."""
        ...

    def read_ahead(self, row: int) -> None:
        """Begin to read a row, and return at once."""
        ...

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return the digests of rows [first, last), uint8 [last - first, 16]."""
        ...

    def name(self, row: int) -> str:
        """Return the place of a row."""
        ...

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source."""
        ...


class StoredDataset:
    """A `Dataset` of stored rows. Memory: 24 bytes a row if it has several parts."""

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self._parts = tuple(parts)
        self._firsts = [0, *np.cumsum([len(each.lengths) for each in parts]).tolist()]
        self.lengths = _joined([each.lengths for each in parts])
        self.loss_tokens = _joined([each.loss_tokens for each in parts])
        self._is_weighed = any(each.loss_weights is not each.loss_tokens for each in parts)
        self.loss_weights = _joined([each.loss_weights for each in parts]) if self._is_weighed else self.loss_tokens
        self.ids = np.flatnonzero(self.lengths).astype(np.int64, copy=False)
        self.weights = tuple(
            (start + first, weight)
            for start, part in zip(self._firsts, parts, strict=False)
            for first, weight in part.firsts
        )
        self.skipped: Mapping[str, int] = sum((Counter(each.skipped) for each in parts), Counter())
        firsts = [each.first_with_images for each in parts]
        seen = [start + first for start, first in zip(self._firsts, firsts, strict=False) if first is not None]
        self.first_with_images = min(seen, default=None)
        write_protect(self.lengths, self.loss_tokens, self.loss_weights, self.ids)

    @property
    def num_rows(self) -> int:
        """Number of rows, including those left out."""
        return len(self.lengths)

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        part, within = self._place(row)
        ids, labels, _ = part.row(within)
        return ids[start:stop], (ids if labels is None else labels)[start:stop]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        part, within = self._place(row)
        if not self._is_weighed:
            return None
        ids, labels, weights = part.row(within)
        if weights is not None:
            return weights[start:stop]
        return plain_weights((ids if labels is None else labels)[start:stop])

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        for row in dict.fromkeys(row for row, _, _ in spans):
            part, within = self._place(row)
            part.read_ahead(within)

    def images(self, row: int) -> Sequence[ImageFile]:
        part, within = self._place(row)
        return part.images(within)

    def row_digests(self, first: int, last: int) -> np.ndarray:
        found = [np.empty((0, ROW_DIGEST_BYTES), dtype=np.uint8)]
        for start, part in zip(self._firsts, self._parts, strict=False):
            begin, end = max(first - start, 0), min(last - start, len(part.lengths))
            if begin < end:
                found.append(part.row_digests(begin, end))
        return np.concatenate(found)

    def digest(self) -> bytes:
        """Return the digest of all rows, the same for every store. Cost if not stored: 2 s a million rows."""
        known = self._parts[0].digest if len(self._parts) == 1 else None
        firsts = range(0, self.num_rows, ROWS_AT_ONCE)
        return known or digest_of_rows(
            self.row_digests(first, min(self.num_rows, first + ROWS_AT_ONCE)) for first in firsts
        )

    def name(self, row: int) -> str:
        part, within = self._place(row)
        return part.name(within)

    def source_key(self, row: int) -> str:
        part, within = self._place(row)
        return part.source_key(within)

    def _place(self, row: int) -> tuple[StoredRows, int]:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        number = bisect.bisect_right(self._firsts, row) - 1
        return self._parts[number], row - self._firsts[number]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class MemoryRows:
    """`StoredRows` in memory: row r begins at `offsets[r]` of the flat arrays.

    flat_tokens: int32 [tokens]. flat_labels: int32 [tokens]; None if all labels are the ids. flat_weights: float32
    [tokens]; None if all are 0 or 1. offsets: int64 [rows + 1].
    """

    digest: bytes | None = None

    def __init__(
        self,
        flat_tokens: np.ndarray,
        flat_labels: np.ndarray | None,
        flat_weights: np.ndarray | None,
        offsets: np.ndarray,
        sources: tuple[SourceRows, ...],
        skipped: Mapping[str, int],
        images: Mapping[int, Sequence[ImageFile]],
    ) -> None:
        self._flat, self._offsets, self._sources = (flat_tokens, flat_labels, flat_weights), offsets, sources
        self.skipped, self.lengths, self._images = skipped, np.diff(offsets), images
        self.first_with_images = min(images, default=None)
        self.firsts = tuple((source.first_row, source.weight) for source in sources)
        ids = np.flatnonzero(self.lengths)
        self.loss_tokens = np.maximum(self.lengths - 1, 0)
        if flat_labels is not None and len(ids):  # rows left out have no tokens, so the others tile the array
            counted = flat_labels != NO_LOSS
            counted[offsets[ids]] = False
            self.loss_tokens[ids] = np.add.reduceat(counted, offsets[ids], dtype=np.int64)
        self.loss_weights = self.loss_tokens
        if flat_weights is not None:
            self.loss_weights = np.zeros(len(self.lengths))
            for row in ids:
                self.loss_weights[row] = sum_of_weights(flat_weights[offsets[row] : offsets[row + 1]])
        write_protect(*self._flat, offsets)

    def row(self, row: int) -> RowArrays:
        span = slice(int(self._offsets[row]), int(self._offsets[row + 1]))
        ids, labels, weights = self._flat
        return ids[span], None if labels is None else labels[span], None if weights is None else weights[span]

    def images(self, row: int) -> Sequence[ImageFile]:
        return self._images.get(row, ())

    def read_ahead(self, row: int) -> None:
        """Do nothing: rows are in memory."""

    def row_digests(self, first: int, last: int) -> np.ndarray:
        found = b"".join(
            row_digest(*self.row(row), (each.identity for each in self.images(row))) for row in range(first, last)
        )
        return np.frombuffer(found, dtype=np.uint8).reshape(-1, ROW_DIGEST_BYTES)

    def name(self, row: int) -> str:
        source = self._source(row)
        place = row - source.first_row
        return f"{source.label}:{place + 1}" if source.names is None else source.names[place]

    def source_key(self, row: int) -> str:
        return self._source(row).key

    def _source(self, row: int) -> SourceRows:
        return self._sources[bisect.bisect_right(self._sources, row, key=lambda source: source.first_row) - 1]


class DatasetBuilder:
    """Builds a dataset row by row. Arrays grow in place, so the memory peak is little more than the tokens."""

    def __init__(self) -> None:
        self._tokens, self._labels, self._offsets = array("i"), None, array("q", [0])
        self._weights: array[float] | None = None
        self._sources: list[SourceRows] = []
        self._skipped: dict[str, int] = {}
        self._images: dict[int, Sequence[ImageFile]] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows so far, including those left out."""
        return len(self._offsets) - 1

    def start_source(self, key: str, label: str, names: tuple[str, ...] | None, weight: float = 1.0) -> None:
        """Start the rows of the next source."""
        first_row = len(self._offsets) - 1
        self._sources.append(SourceRows(key=key, label=label, first_row=first_row, names=names, weight=weight))

    def add(
        self,
        tokens: np.ndarray,
        labels: np.ndarray | None,
        weights: np.ndarray | None = None,
        images: Sequence[ImageFile] = (),
    ) -> None:
        """Append a row, int32 [length]. labels: None for the tokens. weights: float32 [length]; None for 0 or 1."""
        if images:
            self._images[self.num_rows] = images
        if weights is not None and self._weights is None:
            so_far = self._tokens if self._labels is None else self._labels
            self._weights = array("f", plain_weights(np.frombuffer(so_far, dtype=np.int32)))
        if labels is not None and self._labels is None:
            self._labels = array("i", self._tokens)
        self._tokens.frombytes(_as_bytes(tokens))
        if self._labels is not None:
            self._labels.frombytes(_as_bytes(tokens if labels is None else labels))
        if self._weights is not None:
            given = plain_weights(tokens if labels is None else labels) if weights is None else weights
            self._weights.frombytes(np.ascontiguousarray(given, dtype=np.float32).view(np.uint8).data)
        self._offsets.append(len(self._tokens))

    def skip(self, reason: str) -> None:
        """Append a row without tokens, and count the reason."""
        self._skipped[reason] = self._skipped.get(reason, 0) + 1
        self._offsets.append(len(self._tokens))

    def rows(self) -> MemoryRows:
        """Return the rows, and give up the builder."""
        return MemoryRows(
            flat_tokens=np.frombuffer(self._tokens, dtype=np.int32),
            flat_labels=None if self._labels is None else np.frombuffer(self._labels, dtype=np.int32),
            flat_weights=None if self._weights is None else np.frombuffer(self._weights, dtype=np.float32),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            sources=tuple(self._sources),
            skipped=dict(self._skipped),
            images=self._images,
        )

    def finish(self) -> StoredDataset:
        """Return the dataset, and give up the builder."""
        return StoredDataset([self.rows()])


def plain_weights(labels: np.ndarray) -> np.ndarray:
    """Return loss weights from labels, float32: 0 at `NO_LOSS`, else 1."""
    return (labels != NO_LOSS).astype(np.float32)


def sum_of_weights(weights: np.ndarray) -> float:
    """Return the sum of a row's loss weights in fp64; the first token has no loss."""
    return float(weights[1:].sum(dtype=np.float64))


def _as_bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values, dtype=np.int32).view(np.uint8).data


TOO_LONG = "too long"
