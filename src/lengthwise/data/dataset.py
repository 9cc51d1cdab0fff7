"""The sequences of a run: what the trainer asks of them, and the form that is whole in memory.

A sequence's id is its row number over all sources; a row that was left out keeps its number with length 0. In memory
there is one flat array of tokens and where each sequence starts: four bytes a token, eight a row. Sequences that no
plan on the cluster, or the model itself, can hold are refused before a process starts.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.data.digests import ROW_DIGEST_BYTES, ROWS_AT_ONCE, digest_of_rows, row_digest

NO_LOSS = -100
_SHOWN = 5  # sequences that are too long, in one message


class Dataset(Protocol):
    """Rows of tokens, wherever they lie; arrays are read-only, and an entry is a row."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]; 0 for one that is left out."""
        ...

    @property
    def loss_tokens(self) -> np.ndarray:
        """Tokens with a loss of each row, int64 [rows]: position t predicts t + 1, so the first label never counts."""
        ...

    @property
    def loss_weights(self) -> np.ndarray:
        """What the losses of each row's tokens weigh together, [rows]: its `loss_tokens` where none has a weight."""
        ...

    @property
    def ids(self) -> np.ndarray:
        """The rows that are not left out, ascending, int64."""
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many rows are left out, by reason, for messages."""
        ...

    @property
    def weights(self) -> tuple[tuple[int, float], ...]:
        """The first row of each source, ascending, and how often an epoch takes each of its rows: 1.0, 0.5, 3.0."""
        ...

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of tokens [start, stop) of a row, int32 [stop - start] each.

        Labels are not shifted: entry i is what token start + i should have been, `NO_LOSS` where it has no loss.
        """
        ...

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return what the losses of tokens [start, stop) of a row weigh, as labels lie, float32 [stop - start].

        None where no row has other weights than 0 and 1: the labels say it all.
        """
        ...

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Begin to read what `read` of these (row, start, stop) will need, without waiting for it."""
        ...

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]: see `digests`."""
        ...

    def digest(self) -> bytes:
        """Return 32 bytes that differ where any row differs, so that ranks can compare what they read."""
        ...

    def name(self, row: int) -> str:
        """Return where a row is, for messages: `train.jsonl:3`, or the file's path inside its folder."""
        ...

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        ...


class NumberedRows:
    """What every `Dataset` here has beside the protocol: its rows counted, and their numbers checked."""

    __slots__ = ()
    lengths: np.ndarray

    @property
    def num_rows(self) -> int:
        """All rows, with those left out."""
        return len(self.lengths)

    def check_row(self, row: int) -> None:
        """Raise IndexError for a row that there is none of, numbers below 0 included."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing: rows in memory need no reading."""


def write_protect(*arrays: np.ndarray | None) -> None:
    """Make arrays read-only."""
    for values in arrays:
        if values is not None:
            values.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Which rows came from one source. `names` has one name a row; without it a row is `label:line`."""

    key: str
    label: str
    first_row: int
    names: tuple[str, ...] | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryDataset(NumberedRows):
    """All sequences in memory: a `Dataset`. `flat_labels` is None where every label is a token, `flat_weights`, float32
    [tokens], where all are 0 or 1.

    `flat_tokens` and `flat_labels` are int32 [tokens]; row r has entries `offsets[r]` to `offsets[r + 1]`, int64
    [rows + 1]. `skipped` counts the rows left out, by reason.
    """

    flat_tokens: np.ndarray
    flat_labels: np.ndarray | None
    offsets: np.ndarray
    sources: tuple[SourceRows, ...]
    skipped: Mapping[str, int]
    flat_weights: np.ndarray | None = None
    lengths: np.ndarray = field(init=False)
    loss_tokens: np.ndarray = field(init=False)
    loss_weights: np.ndarray = field(init=False)
    ids: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.diff(self.offsets)
        ids = np.flatnonzero(lengths).astype(np.int64)
        loss_tokens = np.maximum(lengths - 1, 0)
        if self.flat_labels is not None and len(ids):  # rows left out have no tokens, so the others tile the array
            counted = self.flat_labels != NO_LOSS
            counted[self.offsets[ids]] = False
            loss_tokens[ids] = np.add.reduceat(counted, self.offsets[ids], dtype=np.int64)
        loss_weights = loss_tokens
        if self.flat_weights is not None:
            loss_weights = np.zeros(len(lengths))
            for row in ids:
                loss_weights[row] = sum_of_weights(self.flat_weights[self.offsets[row] : self.offsets[row + 1]])
        found = {"lengths": lengths, "loss_tokens": loss_tokens, "loss_weights": loss_weights, "ids": ids}
        for name, values in found.items():
            object.__setattr__(self, name, values)
        write_protect(self.flat_tokens, self.flat_labels, self.flat_weights, self.offsets, *found.values())

    @property
    def weights(self) -> tuple[tuple[int, float], ...]:
        """The first row of each source, and how often an epoch takes each of its rows."""
        return tuple((source.first_row, source.weight) for source in self.sources)

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of ids and labels of tokens [start, stop) of a row, int32 [stop - start] each."""
        span, labels = self._span(row), self.flat_tokens if self.flat_labels is None else self.flat_labels
        return self.flat_tokens[span][start:stop], labels[span][start:stop]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return a view of the weights of tokens [start, stop) of a row, float32 [stop - start], if there are any."""
        return None if self.flat_weights is None else self.flat_weights[self._span(row)][start:stop]

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]."""
        found = bytearray()
        for row in range(first, last):
            span = self._span(row)
            labels = None if self.flat_labels is None else self.flat_labels[span]
            weights = None if self.flat_weights is None else self.flat_weights[span]
            found += row_digest(self.flat_tokens[span], labels, weights)
        return np.frombuffer(found, dtype=np.uint8).reshape(-1, ROW_DIGEST_BYTES)

    def digest(self) -> bytes:
        """Return the digest of all rows: 2 s a million of them, the same wherever they lie."""
        return digest_of_parts(self)

    def name(self, row: int) -> str:
        """Return where a row is: `train.jsonl:3`, or the file's path inside its folder."""
        source = self._source(row)
        place = row - source.first_row
        return f"{source.label}:{place + 1}" if source.names is None else source.names[place]

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        return self._source(row).key

    def _source(self, row: int) -> SourceRows:
        self.check_row(row)
        return self.sources[bisect.bisect_right(self.sources, row, key=lambda source: source.first_row) - 1]

    def _span(self, row: int) -> slice:
        self.check_row(row)
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))


def digest_of_parts(dataset: Dataset) -> bytes:
    """Return the digest of a dataset from those of its rows, some at a time."""
    rows = len(dataset.lengths)
    firsts = range(0, rows, ROWS_AT_ONCE)
    return digest_of_rows(dataset.row_digests(first, min(rows, first + ROWS_AT_ONCE)) for first in firsts)


class DatasetBuilder:
    """Gather rows one at a time; arrays grow in place, so the peak is little more than the tokens themselves."""

    def __init__(self) -> None:
        self._tokens, self._labels, self._offsets = array("i"), None, array("q", [0])
        self._weights: array[float] | None = None
        self._sources: list[SourceRows] = []
        self._skipped: dict[str, int] = {}

    @property
    def num_rows(self) -> int:
        """All rows so far, with those left out."""
        return len(self._offsets) - 1

    def start_source(self, key: str, label: str, names: tuple[str, ...] | None, weight: float = 1.0) -> None:
        """Note where the following rows come from."""
        first_row = len(self._offsets) - 1
        self._sources.append(SourceRows(key=key, label=label, first_row=first_row, names=names, weight=weight))

    def add(self, tokens: np.ndarray, labels: np.ndarray | None, weights: np.ndarray | None = None) -> None:
        """Append one sequence, int32 [length] each; labels None means the tokens.

        weights: float32 [length]; None means 1 where there is a loss.
        """
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
        """Append a row that is left out, and count it."""
        self._skipped[reason] = self._skipped.get(reason, 0) + 1
        self._offsets.append(len(self._tokens))

    def finish(self) -> MemoryDataset:
        """Return the arrays as a dataset; the builder is of no use afterwards."""
        return MemoryDataset(
            flat_tokens=np.frombuffer(self._tokens, dtype=np.int32),
            flat_labels=None if self._labels is None else np.frombuffer(self._labels, dtype=np.int32),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            sources=tuple(self._sources),
            skipped=dict(self._skipped),
            flat_weights=None if self._weights is None else np.frombuffer(self._weights, dtype=np.float32),
        )


def plain_weights(labels: np.ndarray) -> np.ndarray:
    """Return what labels weigh by themselves, float32: 1, and 0 where there is no loss."""
    return (labels != NO_LOSS).astype(np.float32)


def sum_of_weights(weights: np.ndarray) -> float:
    """Return what the losses of a row's tokens weigh together: all but the first's, summed in fp64."""
    return float(weights[1:].sum(dtype=np.float64))


def _as_bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values, dtype=np.int32).view(np.uint8).data


TOO_LONG = "too long"


def too_long(where: str, length: int, max_tokens: int, key: str) -> DataError:
    """Return the error for a row of more tokens than its source may have; `key` is the source's config path."""
    expected, got = f"at most max_tokens {max_tokens}", f"{length} tokens"
    remedy = f"Raise {key}.max_tokens, or set {key}.too_long: skip to leave such rows out."
    return DataError(where, expected=expected, got=got, remedy=remedy)


def check_fits(
    dataset: Dataset,
    *,
    ranks: int,
    capacity_tokens: int,
    held_tokens: int | None = None,
    cuts: bool = True,
    stages: int = 1,
) -> None:
    """Raise DataError for sequences of more tokens than all ranks hold, or than one does where none is cut.

    The message names the longest five and what would hold them all. `held_tokens`: what a rank of this capacity holds
    with what it offloads; None: no more. `stages`: of which each is a pipeline of as many ranks.
    """
    held_tokens = held_tokens or capacity_tokens
    if not cuts:
        instead = "Raise capacity_tokens, set recompute: layer, take a planner that cuts sequences (lengthwise), or"
        _refuse_longer(dataset, held_tokens, "what one rank holds: the planner cuts no sequence", instead)
        return
    limit, longest = ranks * held_tokens, int(dataset.lengths.max(initial=0))
    enough = -(-longest * capacity_tokens // (ranks * held_tokens))
    offloads = f" (of {held_tokens} tokens each, with offload)" if held_tokens > capacity_tokens else ""
    _refuse_longer(
        dataset,
        limit,
        f"{counted(ranks, 'rank' if stages == 1 else 'replica')} x capacity_tokens {capacity_tokens}{offloads}",
        f"Run on at least {-(-longest // held_tokens) * stages} ranks, or set capacity_tokens: {enough} or auto, or",
    )


def check_positions(dataset: Dataset, *, positions: int) -> None:
    """Raise DataError for sequences with more tokens than the model has positions."""
    why = "the model's max_position_embeddings (it looks positions up in a table)"
    _refuse_longer(dataset, positions, why, "Use a model with more positions, or")


def _refuse_longer(dataset: Dataset, limit: int, why: str, instead: str) -> None:
    too_long = np.flatnonzero(dataset.lengths > limit)
    if not len(too_long):
        return
    longest_first = too_long[np.argsort(-dataset.lengths[too_long], kind="stable")]
    shown = [f"{row} ({dataset.name(row)}, {dataset.lengths[row]} tokens)" for row in map(int, longest_first[:_SHOWN])]
    more = f" and {len(too_long) - _SHOWN} more" if len(too_long) > _SHOWN else ""
    where = ", ".join(sorted({dataset.source_key(int(row)) for row in too_long}))
    got = f"{len(too_long)} longer: sequence {', '.join(shown)}{more}"
    remedy = f"{instead} leave them out with max_tokens: {limit} and too_long: skip."
    raise DataError(where, expected=f"sequences of at most {limit} tokens, {why}", got=got, remedy=remedy)
