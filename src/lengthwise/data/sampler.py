"""The sequences of each step: a pure function of lengths and config, equal on every machine and at any rank count.

An epoch orders ids by a 64-bit hash of (seed, epoch, id): the finaliser of splitmix64 (Steele, Lea, Flood 2014) applied
three times. It is a bijection, so no two ids of an epoch meet, and no change of a library's generator can change it.
10M ids take about two seconds.

A source of weight w gives row i of n, at place p(i) of an order of the source, floor(w (e + 1) + p(i) / n) - floor(w e
+ p(i) / n) times to epoch e: each row comes floor(w) or ceil(w) times an epoch, and w times on average, over epochs
and, within one, over the rows of the source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import Dataset

if TYPE_CHECKING:
    from lengthwise.config.schema import RunConfig

_MASK = (1 << 64) - 1
_NO_EPOCH = 1 << 63  # epoch number of the order that decides which rows of a weighted source an epoch takes
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


Position: TypeAlias = tuple[int, int] | tuple[int, int, str]
"""(epoch, place in its order of all rows), and for streams a mark to read from (`data/feed_order.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one step in ledger order; `step` counts from 1, `epoch` from 0, `ids` are int64.

    end, digest: start of the next step and digest of the rows, if rows come from feeds; else None.
    """

    step: int
    epoch: int
    ids: np.ndarray
    end: Position | None = None
    digest: str | None = None


def epoch_order(ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Return distinct `ids` (int64, not negative) in the order of an epoch."""
    return np.asarray(ids)[np.argsort(epoch_keys(ids, seed=seed, epoch=epoch), kind="stable")]


def epoch_keys(ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Return the sort keys of `ids` in an epoch, uint64; a key depends on its id alone."""
    base = _mix(_mix(np.array([seed & _MASK], dtype=np.uint64)) + np.uint64(epoch))
    return _mix(base + np.asarray(ids).astype(np.uint64))


def _mix(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(_GAMMA)  # whole numbers wrap around, as the definition requires
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def no_loss(where: str, rows: str) -> DataError:
    """Return the error for a step without a loss."""
    remedy = "Enlarge global_batch, or leave out sequences of one token and fully masked ones."
    return DataError(
        where, expected="at least one token with a label in a global batch", got=f"none in {rows}", remedy=remedy
    )


class Batches:
    """The steps of stored rows. An iteration sorts one epoch at a time and may be repeated.

    A step takes the next ids of the epoch's order: `global_batch.sequences`, or as many whole sequences as fit
    `global_batch.tokens`, at least one. No step crosses an epoch, so the last of an epoch may be smaller. known: rows
    that forecasts and limits use, all rows if `is_known`.
    """

    is_known = True

    def __init__(self, dataset: Dataset, config: RunConfig) -> None:
        if not len(dataset.ids):
            remedy = "Add rows, or raise max_tokens."
            raise DataError("data", expected="at least one sequence to train on", got="none", remedy=remedy)
        self.dataset = self.known = dataset
        self._ids, self._lengths, self._config = dataset.ids, dataset.lengths, config
        self._weights = dataset.weights
        self._is_weighted = any(weight != 1 for _, weight in self._weights)
        if self._is_weighted and config.epochs is not None and not any(map(len, map(self.order, range(config.epochs)))):
            got, remedy = f"none in {config.epochs}, by their weights", "Raise weight, or epochs."
            raise DataError("data", expected="at least one sequence in all epochs", got=got, remedy=remedy)

    def __iter__(self) -> Iterator[Batch]:
        steps, epochs = self._config.steps, self._config.epochs
        step = epoch = 0
        while epochs is None or epoch < epochs:
            order = self.order(epoch)
            for first, last in self._cuts(order):
                step += 1
                yield Batch(step=step, epoch=epoch, ids=order[first:last])
                if step == steps:
                    return
            epoch += 1

    def after(self, step: int, position: Position | None = None) -> Iterator[Batch]:
        """Yield the steps after the first `step`; stored rows need no `position`."""
        del position
        return islice(self, step, None)

    def order(self, epoch: int) -> np.ndarray:
        """Return the ids of an epoch in order, each repeated by the weight of its source."""
        if not self._is_weighted:
            return epoch_order(self._ids, seed=self._config.seed, epoch=epoch)
        rows = len(self._lengths)
        places = [self._ids_of_source(epoch, number) for number in range(len(self._weights))]
        return epoch_order(np.concatenate(places), seed=self._config.seed, epoch=epoch) % rows

    @property
    def most_copies(self) -> int:
        """Largest number of times that an epoch takes a row."""
        return max((math.ceil(weight) for _, weight in self._weights), default=1)

    @property
    def most_tokens(self) -> int:
        """Largest possible number of tokens of a global batch."""
        lengths, batch_size = np.sort(self._lengths[self._ids])[::-1], self._config.global_batch
        if batch_size.tokens is not None:
            return max(int(lengths[0]), batch_size.tokens)
        return int(np.repeat(lengths[: batch_size.sequences], self.most_copies)[: batch_size.sequences].sum())

    def drawn_lengths(self, most: int) -> np.ndarray:
        """Return the lengths of at most `most` rows that the run draws first, sorted by row."""
        drawn = chain.from_iterable(batch.ids for batch in self)
        return self._lengths[np.sort(list(islice(drawn, min(len(self._ids), most))))]

    def check_losses(self) -> None:
        """Raise DataError for steps without a loss."""
        losses = self.dataset.loss_tokens
        if losses[self._ids].all():
            return
        first, number = self.steps_of_zero(losses)
        if first is not None:
            where = f"step {first.step}" + (f" and {number - 1} more" if number > 1 else "")
            rows = f"sequences {', '.join(map(str, first.ids[:10]))}{' ...' if len(first.ids) > 10 else ''}"
            raise no_loss(where, rows)

    def _ids_of_source(self, epoch: int, number: int) -> np.ndarray:
        """Return the ids that an epoch takes of a source; the n-th repetition of id i is i + n x (number of rows)."""
        (first, weight), rows = self._weights[number], len(self._lengths)
        last = self._weights[number + 1][0] if number + 1 < len(self._weights) else rows
        ids = self._ids[np.searchsorted(self._ids, first) : np.searchsorted(self._ids, last)]
        if weight == 1:
            return ids
        ordered = epoch_order(ids, seed=self._config.seed, epoch=_NO_EPOCH)
        phase = np.arange(len(ids)) / max(1, len(ids))
        times = (np.floor(weight * (epoch + 1) + phase) - np.floor(weight * epoch + phase)).astype(np.int64)
        again = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        return np.repeat(ordered, times) + again * rows

    @cached_property
    def num_steps(self) -> int:
        """Number of steps of the run. Cost: one sort an epoch if steps are by tokens."""
        steps, epochs = self._config.steps, self._config.epochs
        if steps is not None:
            return steps
        assert epochs is not None, "a RunConfig has steps or epochs"
        sequences = self._config.global_batch.sequences
        if sequences is not None and not self._is_weighted:
            return epochs * -(-len(self._ids) // sequences)
        return sum(sum(1 for _ in self._cuts(self.order(epoch))) for epoch in range(epochs))

    def steps_of_zero(self, values: np.ndarray) -> tuple[Batch | None, int]:
        """Return (first step whose `values`, (rows,), are all zero, or None, number of such steps)."""
        found, number, done, epoch = None, 0, 0, 0
        most = np.iinfo(np.int64).max if self._config.steps is None else self._config.steps
        while done < most and (self._config.epochs is None or epoch < self._config.epochs):
            order = self.order(epoch)
            if not len(order):  # weights below 1 may leave an epoch empty
                epoch += 1
                continue
            cuts = np.array(list(self._cuts(order)))
            are_zero = np.flatnonzero(~np.logical_or.reduceat(values[order] != 0, cuts[:, 0])[: most - done])
            if found is None and len(are_zero):
                first, last = cuts[are_zero[0]]
                found = Batch(step=done + int(are_zero[0]) + 1, epoch=epoch, ids=order[first:last])
            number, done, epoch = number + len(are_zero), done + len(cuts), epoch + 1
        return found, number

    def _cuts(self, order: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield (first, end) places in `order` of every step."""
        sequences, tokens = self._config.global_batch.sequences, self._config.global_batch.tokens
        if sequences is not None:
            for first in range(0, len(order), sequences):
                yield first, min(first + sequences, len(order))
            return
        assert tokens is not None, "a GlobalBatch has sequences or tokens"
        if not len(order):
            return
        ends = np.cumsum(self._lengths[order])
        tokens = min(tokens, int(ends[-1]))
        first, used = 0, 0
        while first < len(order):
            last = max(first + 1, int(np.searchsorted(ends, used + tokens, side="right")))
            yield first, last
            first, used = last, int(ends[last - 1])
