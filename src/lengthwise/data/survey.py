"""Figures of a dataset (lengths, loss tokens, copies, one row with its mask), and checks of its longest rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.data.dataset import NO_LOSS, Dataset

_SHOWN = 5  # rows named in one message
_LOOKED_AT = 1 << 16  # rows in which `masked_row` looks for labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Rows that copy an earlier one.

    original, first_copy: most copied row and its first copy, -1 if none. most: number of its copies.
    """

    rows: int
    tokens: int
    original: int
    first_copy: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Figures of a dataset. lengths: without empty rows. longest, rows_without_loss: row numbers, longest first."""

    lengths: np.ndarray
    num_tokens: int
    num_loss_tokens: int
    rows_without_loss: np.ndarray
    skipped: Mapping[str, int]
    longest: tuple[int, ...]
    copies: Copies


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpan:
    """Consecutive tokens of a row that all have a loss, or all have none."""

    ids: np.ndarray
    has_loss: bool


def survey(dataset: Dataset, *, longest: int) -> Survey:
    """Count a dataset and name its `longest` longest rows. Cost: 2 s a million rows in memory, for their digests."""
    lengths = np.asarray(dataset.lengths[dataset.ids])
    order = np.argsort(-lengths, kind="stable")[:longest]
    return Survey(
        lengths=lengths,
        num_tokens=int(lengths.sum()),
        num_loss_tokens=int(dataset.loss_tokens.sum()),
        rows_without_loss=rows_without_loss(dataset),
        skipped=dataset.skipped,
        longest=tuple(int(dataset.ids[place]) for place in order),
        copies=_copies(dataset, lengths),
    )


def rows_over(dataset: Dataset, limit: int) -> np.ndarray:
    """Return the rows of more than `limit` tokens, longest first."""
    rows = np.flatnonzero(dataset.lengths > limit)
    return rows[np.argsort(-dataset.lengths[rows], kind="stable")]


def rows_without_loss(dataset: Dataset) -> np.ndarray:
    """Return the rows without any loss, which cost time and change no update."""
    return dataset.ids[dataset.loss_tokens[dataset.ids] == 0]


def named(dataset: Dataset, rows: np.ndarray) -> str:
    """Return the names of the first rows, and the number of the others."""
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(dataset.name(int(row)) for row in rows[:_SHOWN]) + more


def masked_row(dataset: Dataset) -> int:
    """Return an early row that has tokens without a loss beside its first; the first row if there is none."""
    looked_at = dataset.ids[:_LOOKED_AT]
    masked = np.flatnonzero(dataset.loss_tokens[looked_at] < dataset.lengths[looked_at] - 1)
    return int(looked_at[masked[0]] if len(masked) else looked_at[0])


def stretches(dataset: Dataset, row: int, most_tokens: int) -> list[LossSpan]:
    """Return the first tokens of a row as spans with and without a loss; the first token never has one."""
    ids, labels = dataset.read(row, 0, most_tokens)
    learned = labels != NO_LOSS
    learned[:1] = False
    found, start = [], 0
    for has_loss, group in groupby(learned.tolist()):
        stop = start + sum(1 for _ in group)
        found.append(LossSpan(ids=ids[start:stop], has_loss=has_loss))
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


def check_fits(dataset: Dataset, *, ranks: int, capacity_tokens: int, cuts: bool = True, stages: int = 1) -> None:
    """Raise DataError for sequences longer than all ranks hold, or than one rank holds unless `cuts`.

    The message names the longest five and a capacity that holds all. stages: number of pipeline stages of a rank.
    """
    if not cuts:
        instead = "Raise capacity_tokens, set recompute: layer, take a planner that cuts sequences (lengthwise), or"
        _refuse_longer(dataset, capacity_tokens, "what one rank holds: the planner cuts no sequence", instead)
        return
    longest = int(dataset.lengths.max(initial=0))
    why = f"{counted(ranks, 'rank' if stages == 1 else 'replica')} x capacity_tokens {capacity_tokens}"
    enough, tokens = -(-longest // capacity_tokens) * stages, -(-longest // ranks)
    instead = f"Run on at least {enough} ranks, or set capacity_tokens: {tokens} or auto, or"
    _refuse_longer(dataset, ranks * capacity_tokens, why, instead)


def check_positions(dataset: Dataset, *, positions: int) -> None:
    """Raise DataError for sequences longer than the model's positions."""
    why = "the model's max_position_embeddings (it looks positions up in a table)"
    _refuse_longer(dataset, positions, why, "Use a model with more positions, or")


def _refuse_longer(dataset: Dataset, limit: int, why: str, instead: str) -> None:
    too_long = rows_over(dataset, limit)
    if not len(too_long):
        return
    shown = [f"{row} ({dataset.name(row)}, {dataset.lengths[row]} tokens)" for row in map(int, too_long[:_SHOWN])]
    more = f" and {len(too_long) - _SHOWN} more" if len(too_long) > _SHOWN else ""
    where = ", ".join(sorted({dataset.source_key(int(row)) for row in too_long}))
    got = f"{len(too_long)} longer: sequence {', '.join(shown)}{more}"
    remedy = f"{instead} leave them out with max_tokens: {limit} and too_long: skip."
    raise DataError(where, expected=f"sequences of at most {limit} tokens, {why}", got=got, remedy=remedy)
