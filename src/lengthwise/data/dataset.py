"""The sequences of a run in memory: one flat array of tokens and where each sequence starts.

A sequence's id is its row number over all sources; a row that was left out keeps its number with length 0. Four bytes
a token, eight a row, and no Python object for either.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

NO_LOSS = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Which rows came from one source. `names` has one name a row; without it a row is `label:line`."""

    key: str
    label: str
    first_row: int
    names: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """All sequences, read-only. `offsets` is int64 [rows + 1]; `flat_labels` is None where every label is a token."""

    flat_tokens: np.ndarray
    flat_labels: np.ndarray | None
    offsets: np.ndarray
    sources: tuple[SourceRows, ...]
    skipped: Mapping[str, int]
    lengths: np.ndarray = field(init=False)
    ids: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.diff(self.offsets)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "ids", np.flatnonzero(lengths).astype(np.int64))
        for values in (self.flat_tokens, self.flat_labels, self.offsets, self.lengths, self.ids):
            if values is not None:
                values.flags.writeable = False

    @property
    def num_rows(self) -> int:
        """All rows, with those left out."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.flat_tokens)

    def tokens(self, row: int) -> np.ndarray:
        """Token ids of one sequence, int32 [length]; empty for a row left out."""
        return self.flat_tokens[self._span(row)]

    def labels(self, row: int) -> np.ndarray:
        """Labels of one sequence, not yet shifted, int32 [length]: its own, else its tokens; -100 carries no loss."""
        return self.tokens(row) if self.flat_labels is None else self.flat_labels[self._span(row)]

    def loss_tokens(self, row: int) -> int:
        """Positions with a loss: position t predicts t + 1, so the first label never counts."""
        return int(np.count_nonzero(self.labels(row)[1:] != NO_LOSS))

    def name(self, row: int) -> str:
        """Where a row is: `train.jsonl:3`, or the file's path inside its folder."""
        source = self._source(row)
        place = row - source.first_row
        return f"{source.label}:{place + 1}" if source.names is None else source.names[place]

    def source_key(self, row: int) -> str:
        """The config path of a row's source: `data.0`."""
        return self._source(row).key

    def _source(self, row: int) -> SourceRows:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        return self.sources[bisect.bisect_right(self.sources, row, key=lambda source: source.first_row) - 1]

    def _span(self, row: int) -> slice:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))


class DatasetBuilder:
    """Gathers rows one at a time. Arrays grow in place, so the peak is little more than the tokens themselves."""

    def __init__(self) -> None:
        self._tokens, self._labels, self._offsets = array("i"), None, array("q", [0])
        self._sources: list[SourceRows] = []
        self._skipped: dict[str, int] = {}

    def start_source(self, key: str, label: str, names: tuple[str, ...] | None) -> None:
        """Say where the following rows come from."""
        self._sources.append(SourceRows(key=key, label=label, first_row=len(self._offsets) - 1, names=names))

    def add(self, tokens: np.ndarray, labels: np.ndarray | None) -> None:
        """Append one sequence, int32 [length] each; labels None means the tokens."""
        if labels is not None and self._labels is None:
            self._labels = array("i", self._tokens)
        self._tokens.frombytes(_as_bytes(tokens))
        if self._labels is not None:
            self._labels.frombytes(_as_bytes(tokens if labels is None else labels))
        self._offsets.append(len(self._tokens))

    def skip(self, reason: str) -> None:
        """Append a row that is left out, and count it."""
        self._skipped[reason] = self._skipped.get(reason, 0) + 1
        self._offsets.append(len(self._tokens))

    def finish(self) -> Dataset:
        """Hand the arrays over; the builder is of no use afterwards."""
        return Dataset(
            flat_tokens=np.frombuffer(self._tokens, dtype=np.int32),
            flat_labels=None if self._labels is None else np.frombuffer(self._labels, dtype=np.int32),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            sources=tuple(self._sources),
            skipped=dict(self._skipped),
        )


def _as_bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values, dtype=np.int32).view(np.uint8).data
