"""What a dataset is, in figures: lengths, tokens with a loss, copies, and one row with what of it is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from lengthwise.data.dataset import NO_LOSS, Dataset

_LOOKED_AT = 1 << 16  # rows among which one with labels of its own is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Rows that are copies of an earlier one; the most copied row, and its first copy. None of them: rows -1."""

    rows: int
    tokens: int
    original: int
    first_copy: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Figures of a dataset; `lengths` of the rows that are not left out. `longest`: row numbers, longest first."""

    lengths: np.ndarray
    num_tokens: int
    num_loss_tokens: int
    rows_without_loss: int
    skipped: Mapping[str, int]
    longest: tuple[int, ...]
    copies: Copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens of a row one after the other that all have a loss, or all have none."""

    ids: np.ndarray
    has_loss: bool


def survey(dataset: Dataset, *, longest: int) -> Survey:
    """Count a dataset; `longest` rows are named. Cost: 2 s a million rows in memory, for their digests."""
    lengths = np.asarray(dataset.lengths[dataset.ids])
    order = np.argsort(-lengths, kind="stable")[:longest]
    return Survey(
        lengths=lengths,
        num_tokens=int(lengths.sum()),
        num_loss_tokens=int(dataset.loss_tokens.sum()),
        rows_without_loss=int(np.count_nonzero(dataset.loss_tokens[dataset.ids] == 0)),
        skipped=dataset.skipped,
        longest=tuple(int(dataset.ids[place]) for place in order),
        copies=_copies(dataset, lengths),
    )


def rows_over(dataset: Dataset, limit: int) -> np.ndarray:
    """Return the rows of more than `limit` tokens, longest first."""
    rows = np.flatnonzero(dataset.lengths > limit)
    return rows[np.argsort(-dataset.lengths[rows], kind="stable")]


def masked_row(dataset: Dataset) -> int:
    """Return the first of some rows with tokens that have no loss beside its first one; without any, the first row."""
    looked_at = dataset.ids[:_LOOKED_AT]
    masked = np.flatnonzero(dataset.loss_tokens[looked_at] < dataset.lengths[looked_at] - 1)
    return int(looked_at[masked[0]] if len(masked) else looked_at[0])


def stretches(dataset: Dataset, row: int, most_tokens: int) -> list[Stretch]:
    """Return the first tokens of a row, cut where those with a loss begin or end; the first token never has one."""
    ids, labels = dataset.read(row, 0, most_tokens)
    learned = labels != NO_LOSS
    learned[:1] = False
    found, start = [], 0
    for has_loss, group in groupby(learned.tolist()):
        stop = start + sum(1 for _ in group)
        found.append(Stretch(ids=ids[start:stop], has_loss=has_loss))
        start = stop
    return found


def _copies(dataset: Dataset, lengths: np.ndarray) -> Copies:
    digests = np.ascontiguousarray(dataset.row_digests(0, len(dataset.lengths))[dataset.ids])
    _, first, group, counts = np.unique(
        digests.view("V16").ravel(), return_index=True, return_inverse=True, return_counts=True
    )
    copies = np.ones(len(digests), dtype=bool)
    copies[first] = False
    if not copies.any():
        return Copies(rows=0, tokens=0, original=-1, first_copy=-1, most=0)
    most = int(counts.argmax())
    same = np.flatnonzero(group.ravel() == most)
    return Copies(
        rows=int(copies.sum()),
        tokens=int(lengths[copies].sum()),
        original=int(dataset.ids[same[0]]),
        first_copy=int(dataset.ids[same[1]]),
        most=int(counts[most]),
    )
