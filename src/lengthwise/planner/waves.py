"""Plans in lock-step: every rank in every microbatch, for parameters that all ranks gather at once (FSDP, ZeRO-3).

A wave is one microbatch of many pieces; it lasts as long as its slowest rank, and the step is the sum of its waves. So
what counts is that all ranks of a wave need the same time, and that waves are few where launches cost.

1. For a time t, the longest sequences that are left are cut just so far that each takes no longer, and put side by side
   until the line of ranks is full; then every rank is filled up with the longest local sequences that fit both its
   capacity and its time. That is one wave.
2. Several t are tried: those that cut the longest sequence over N ranks, N / 2, N / 3 and so on, those that fill the
   capacity with sequences of some quantile, and what levels all that is left over as few waves as can hold it. Of the
   waves that lose about least, the longest is kept, and the next one begins. What "about" means is tried in
   three ways where launches cost.

Long sequences come first and together, short ones are left to level the last waves. Costs waves x tries x (N + n).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.planner.degrees import degree_search
from lengthwise.planner.packs import ShortSequences
from lengthwise.planner.request import PlanRequest
from lengthwise.planner.rings import ring_order

PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the longest sequence is tried over N / part ranks
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the tokens left, shortest sequences first
_PATIENCE = (0.01, 0.003, 0.03)  # of the ranks' time; a longer wave may lose so much more than the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """One wave: pieces as (first rank, degree, sequences), what it leaves, its useful share of the ranks' time."""

    pieces: list[tuple[int, int, list[int]]]
    left: ShortSequences
    seconds: float
    useful: float


def plan_waves(request: PlanRequest) -> list[Microbatch]:
    """Plan one step in lock-step."""
    builder = _Builder(request)
    tried = [_waves(builder, patience) for patience in (_PATIENCE if builder.launch else _PATIENCE[:1])]
    waves = min(tried, key=lambda waves: sum(wave.seconds for wave in waves))
    return [Microbatch(pieces=tuple(map(_piece, wave.pieces))) for wave in waves]


def _waves(builder: _Builder, patience: float) -> list[Wave]:
    """Build wave after wave; of those that lose at most `patience` more than the best, the longest."""
    left, waves = builder.all_sequences(), list[Wave]()
    while order := left.left():
        tried = [builder.build(left, order, seconds) for seconds in builder.times(order)]
        most = max(wave.useful for wave in tried)
        waves.append(max((each for each in tried if each.useful >= most - patience), key=lambda wave: wave.seconds))
        left = waves[-1].left
        assert waves[-1].pieces, f"a wave without work, {len(order)} sequences left"
    return waves


def _piece(placed: tuple[int, int, list[int]]) -> Piece:
    first, degree, sequences = placed
    return Piece(ranks=ring_order(first, degree), sequences=tuple(sequences))


class _Builder:
    """Builds waves; arrays are of all sequences, shortest first, and indices are into them."""

    def __init__(self, request: PlanRequest) -> None:
        self.cost, self.ranks, self.capacity = request.cost, request.cluster.ranks, request.cluster.capacity_tokens
        self.order = np.lexsort((-np.arange(len(request.tokens)), request.lengths))
        self.lengths = request.lengths[self.order]
        self.least = request.least_degrees[self.order]
        self.alone = self.cost.compute_seconds(self.lengths)
        self.launch = self.cost.fixed_seconds

    def all_sequences(self) -> ShortSequences:
        return ShortSequences(self.order.tolist(), self.lengths.tolist(), self.alone.tolist())

    def times(self, order: list[int]) -> list[float]:
        """List the durations to try for the next wave; `order` holds what is left, longest first."""
        return sorted(set(self._times(np.array(order, dtype=np.int64))), reverse=True)

    def _times(self, order: NDArray[np.int64]) -> Iterator[float]:
        lengths, alone, longest = self.lengths[order], self.alone[order], int(order[0])
        for degree in {max(int(self.least[longest]), self.ranks // part) for part in PARTS if part <= self.ranks}:
            yield self._ring_seconds(longest, degree)
        tokens = np.cumsum(lengths[::-1])
        for place in np.searchsorted(tokens, np.array(QUANTILES) * tokens[-1]).tolist():
            some = int(order[len(order) - 1 - min(place, len(order) - 1)])
            yield self.launch + self.capacity * float(self.alone[some] / self.lengths[some])
        fewest = -(-int(tokens[-1]) // (self.ranks * self.capacity))
        for waves in (fewest, fewest + 1):
            for slack in (1.003, 1.02):
                yield self.launch + slack * float(alone.sum()) / (self.ranks * waves)

    def _ring_seconds(self, index: int, degree: int) -> float:
        one = slice(index, index + 1)
        return self.launch + float(self.cost.ring_piece_seconds(self.lengths[one], np.array([degree]))[0])

    def build(self, left: ShortSequences, order: list[int], seconds: float) -> Wave:
        """Build the wave that no rank needs longer for than `seconds`."""
        pool = left.copy()
        pieces, free, rooms, done = self._put_rings(pool, order, seconds)
        for rank in sorted(range(self.ranks), key=lambda rank: (-free[rank], rank)):
            own: list[int] = []
            room, time_left = rooms[rank], free[rank]
            while room > 0 and (taken := pool.take(room, time_left * (1 + 1e-12))) is not None:
                room -= pool.lengths[taken]
                time_left -= pool.seconds[taken]
                done += pool.seconds[taken]
                own.append(pool.sequences[taken])
            free[rank] = time_left
            if own:
                pieces.append((rank, 1, own))
        took = seconds - min(free)
        useful = done / (self.ranks * took) if took > 0 else 1.0  # a wave that costs nothing loses nothing
        return Wave(pieces=pieces, left=pool, seconds=took, useful=useful if pieces else -1.0)

    def _put_rings(
        self, pool: ShortSequences, order: list[int], seconds: float
    ) -> tuple[list[tuple[int, int, list[int]]], list[float], list[int], float]:
        """Put rings side by side; return them, the time and the room left on every rank, and the work done."""
        free, rooms = [seconds - self.launch] * self.ranks, [self.capacity] * self.ranks
        slow = (self.least > 1) | (self.lengths > self.capacity)  # what is offloaded on one rank is alone there, too
        slow |= self.alone + self.launch > seconds * (1 + 1e-12)
        cut = np.array([i for i in order if slow[i]], dtype=np.int64)
        most = np.full_like(cut, self.ranks)
        degrees = degree_search(self.cost, self.lengths[cut], self.least[cut], most)(seconds)
        took = self.cost.ring_piece_seconds(self.lengths[cut], np.minimum(degrees, self.ranks))
        pieces: list[tuple[int, int, list[int]]] = []
        first, done = 0, 0.0
        for index, degree, ring_seconds in zip(cut.tolist(), degrees.tolist(), took.tolist(), strict=True):
            if degree > self.ranks - first:
                continue
            pool.drop(index)
            pieces.append((first, degree, [pool.sequences[index]]))
            room = max(0, self.capacity - 2 * -(-pool.lengths[index] // (2 * degree))) if degree > 1 else 0
            for rank in range(first, first + degree):
                free[rank], rooms[rank] = max(0.0, free[rank] - ring_seconds), room
            first, done = first + degree, done + pool.seconds[index]
            if first == self.ranks:
                break
        return pieces, free, rooms, done
