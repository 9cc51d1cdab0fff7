"""Plans in lock-step: every rank in every microbatch, for parameters that all ranks gather at once (FSDP, ZeRO-3).

A wave is one microbatch of many pieces; it lasts as long as its slowest rank or its gathers (`cost.ending.Traffic`).
For several durations the longest sequences are cut to fit and ranks filled up; the first level wave, or the longest of
those that lose least, is kept. Waves x tries x (N + n); docs/decisions/waves-one-by-one.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import held_at_most
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner.placement.short_sequences import ShortSequences
from lengthwise.planner.problem.degrees import DegreeTable
from lengthwise.planner.problem.effort import FAR
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.step_lengths import ROUNDING
from lengthwise.program.ring_order import ring_order

Floats = NDArray[np.float64]
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the longest sequence is tried over N / part ranks
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the tokens left, shortest sequences first
_PATIENCE = (0.01, 0.003, 0.03)  # share of the ranks' time that a longer wave may lose beyond the best
_LEVEL = 0.995  # share of the ranks' time in a wave, without launches, that is enough
_SLACKS = (1.003, 1.02, 1.06, 1.12, 1.25, 1.4)  # tried durations, over an even share
_LONGER = (1.0, 1.005, 1.01, 1.025, 1.06)  # tried durations, over the longest sequence at its fastest degree
_AT_ONCE = 64  # sequences, at least, whose degrees are computed together
_MOST_KEPT = 64  # ranks; up to here the price of every degree is kept
_SHORTEST = 0.2  # the shortest duration tried, as a share of an even wave


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """One wave: pieces as (first rank, degree, indices), the sequences left, and shares of the ranks' time.

    seconds: seconds of the wave, with gathers. useful: share spent on work, counting the additional waves it causes.
    level: share without launch and gathers, 0 if it causes additional waves.
    """

    pieces: list[tuple[int, int, list[int]]]
    left: ShortSequences
    seconds: float
    useful: float
    level: float

    def written(self) -> Iterator[Piece]:
        """Yield the pieces as in a plan."""
        for first, degree, indices in self.pieces:
            yield Piece(ranks=ring_order(first, degree), sequences=tuple(self.left.numbers(indices)))


def plan_waves(request: PlanRequest) -> list[Microbatch]:
    """Plan one step in lock-step."""
    builder = _Builder.of(request)
    enough = request.in_waves(request.shared_bound_seconds) * FAR
    best: list[Wave] = []
    for patience, beginning in _ways(builder):
        waves = _waves(builder, patience, beginning, _total(best) if best else inf)
        best = waves or best
        if _total(best) <= enough:
            break
    return [Microbatch(pieces=tuple(wave.written())) for wave in best]


def _total(waves: list[Wave]) -> float:
    return sum(wave.seconds for wave in waves)


def _ways(builder: _Builder) -> Iterator[tuple[float, float | None]]:
    """Yield the ways to try: (patience, seconds of the first wave, or None for the least loss)."""
    yield _PATIENCE[0], None
    beginnings = builder.beginnings()
    yield from ((_PATIENCE[0], seconds) for seconds in beginnings)
    if builder.overhead and len(beginnings) == 1:  # no sequence sets a wave
        yield from ((patience, None) for patience in _PATIENCE[1:])


def _waves(builder: _Builder, patience: float, beginning: float | None, least: float) -> list[Wave]:
    """Build wave after wave: the longest of those that lose at most `patience` more than the best.

    least: seconds of the best waves so far; return [] if these take as long by the arithmetic left.
    """
    waves, took = list[Wave](), 0.0
    while len(builder.order):
        if took + builder.least_seconds >= least * (1 + ROUNDING):
            return []
        begun = builder.build(beginning) if beginning is not None and not waves else None
        if begun is None or not begun.pieces:  # an even share may be shorter than any sequence
            begun = _best_wave(builder.tries(), patience)
        waves.append(begun)
        assert waves[-1].pieces, f"a wave without work, {len(builder.order)} sequences left"
        took += waves[-1].seconds
        builder = builder.rest(waves[-1].left.left()[::-1])
    return waves if took < least else []


def _best_wave(tried: list[Wave], patience: float) -> Wave:
    if tried[-1].level >= _LEVEL:
        return tried[-1]
    most = max(wave.useful for wave in tried)
    return max((each for each in tried if each.useful >= most - patience), key=lambda wave: wave.seconds)


class _Builder:
    """Builds waves of the sequences left; arrays list them, shortest first, and indices are into them."""

    def __init__(
        self,
        cost: Cost,
        cluster: Cluster,
        order: NDArray[np.int64],
        lengths: NDArray[np.int64],
        least: NDArray[np.int64],
        known: dict[bytes, list[Wave]],
        prices: _RingPrices,
    ) -> None:
        self._known = known  # tries, by what was left, since ways often begin alike
        self._prices = prices
        self.cost, self.cluster, self.order, self.lengths, self.least = cost, cluster, order, lengths, least
        self.ranks, self.capacity = cluster.ranks, cluster.capacity_tokens
        self.alone = cost.compute_seconds(lengths)
        self.launch = cost.fixed_seconds
        self.tokens = int(lengths.sum())
        self.fewest = max(1, -(-self.tokens // (self.ranks * self.capacity)))
        even = self.even_seconds
        self.overhead = self.launch + (self._with_gathers(even) - even)  # of an additional wave
        self._pool = ShortSequences(order.tolist(), lengths.tolist(), self.alone.tolist())
        self._rows = np.full(len(order), -1)  # of prices; -1: not priced yet

    @classmethod
    def of(cls, request: PlanRequest) -> _Builder:
        order = np.lexsort((-np.arange(len(request.tokens)), request.lengths))
        lengths, prices = request.lengths[order], _RingPrices(request.cost, request.cluster.ranks)
        return cls(request.cost, request.cluster, order, lengths, request.least_degrees[order], {}, prices)

    def rest(self, left: list[int]) -> _Builder:
        some = np.array(left, dtype=np.int64)
        parts = self.order[some], self.lengths[some], self.least[some]
        return _Builder(self.cost, self.cluster, *parts, self._known, self._prices)

    def tries(self) -> list[Wave]:
        """Build waves of several durations, longest first, up to a level one."""
        key = self.order.tobytes()
        if key not in self._known:
            tried, most = list[Wave](), -inf
            for seconds in self.times():
                tried.append(self.build(seconds))
                most = max(most, tried[-1].useful)
                tried = [each for each in tried if each.useful >= most - max(_PATIENCE) or each is tried[-1]]
                if tried[-1].level >= _LEVEL:
                    break
            self._known[key] = tried
        return self._known[key]

    def times(self) -> list[float]:
        """List the durations to try for the next wave, longest first."""
        return sorted({each for each in self._times() if each >= _SHORTEST * self.even_seconds}, reverse=True)

    @cached_property
    def even_seconds(self) -> float:
        """The duration of each of the fewest waves if all ranks were equally busy in all of them."""
        return self.launch + float(self.alone.sum()) / (self.ranks * self.fewest)

    def _with_gathers(self, seconds: float) -> float:
        return float(self.cost.wave_seconds(seconds, self.cost.choices.recompute))

    @cached_property
    def _longest_seconds(self) -> float:
        """The longest sequence's seconds at its fastest degree."""
        degrees = np.arange(int(self.least[-1]), self.ranks + 1)
        return float(self.cost.ring_piece_seconds(np.full_like(degrees, self.lengths[-1]), degrees).min())

    @property
    def least_seconds(self) -> float:
        """The least time of all waves: even work, or the wave of the longest sequence."""
        return self.launch + max(float(self.alone.sum()) / self.ranks, self._longest_seconds)

    def beginnings(self) -> list[float]:
        """List durations of the first wave: the longest sequence's, or an even share with one more wave."""
        seconds = self._longest_seconds
        setting = [self.launch + more * seconds for more in _LONGER]
        setting = setting if self.launch + seconds > self.even_seconds else []
        evenly = self.launch + _SLACKS[0] * float(self.alone.sum()) / (self.ranks * (self.fewest + 1))
        return [*setting, evenly] if self.overhead else setting

    def _times(self) -> Iterator[float]:
        longest = len(self.order) - 1
        parts = {max(int(self.least[longest]), self.ranks // part) for part in PARTS if part <= self.ranks}
        degrees = np.array(sorted(parts))
        rings = self.cost.ring_piece_seconds(np.full_like(degrees, self.lengths[longest]), degrees)
        yield from (self.launch + rings).tolist()
        tokens = np.cumsum(self.lengths)
        for place in np.searchsorted(tokens, np.array(QUANTILES) * tokens[-1]).tolist():
            some = min(place, longest)
            yield self.launch + self.capacity * float(self.alone[some] / self.lengths[some])
        for waves in (self.fewest, self.fewest + 1):
            for slack in _SLACKS:
                yield self.launch + slack * float(self.alone.sum()) / (self.ranks * waves)

    def build(self, seconds: float) -> Wave:
        pool = self._pool.copy()
        pieces, free, rooms, done, held = self._put_rings(pool, seconds)
        held -= sum(rooms)
        fits_nothing = -1  # room in which nothing fits, even with more time
        for rank in np.argsort(-np.array(free), kind="stable").tolist():
            if rooms[rank] <= fits_nothing:
                continue
            own, rooms[rank], time_left = pool.fill(rooms[rank], free[rank] * (1 + 1e-12))
            if own:
                time_left = max(0.0, time_left - 1e-12 * free[rank])
                done += free[rank] - time_left
                free[rank] = time_left
                pieces.append((rank, 1, own))
            else:
                fits_nothing = rooms[rank]
        took = seconds - min(free)
        held += sum(rooms)
        more = max(0, 1 + -(-held // (self.ranks * self.capacity)) - self.fewest)  # waves beyond the fewest
        whole = self._with_gathers(took)
        spent = self.ranks * (whole + more * self.overhead)
        level = done / max(self.ranks * (took - self.launch), 1e-300)
        useful = done / spent if spent > 0 else 1.0  # a wave that costs no time loses none
        return Wave(
            pieces=pieces,
            left=pool,
            seconds=whole,
            useful=useful if pieces else -1.0,
            level=level if pieces and not (more and self.overhead) else 0.0,
        )

    def _put_rings(
        self, pool: ShortSequences, seconds: float
    ) -> tuple[list[tuple[int, int, list[int]]], list[float], list[int], float, int]:
        """Put rings side by side; return them, time and room left on every rank, the work done, tokens left."""
        free, rooms = [_without_launch(seconds, self.launch)] * self.ranks, [self.capacity] * self.ranks
        slow = (self.least > 1) | (self.lengths > self.capacity)  # one that offloads on one rank is alone there, too
        slow |= self.alone + self.launch > seconds * (1 + 1e-12)
        pieces: list[tuple[int, int, list[int]]] = []
        first, done, left = 0, 0.0, self.tokens
        for index, degree, ring_seconds in self._cut_within(np.flatnonzero(slow)[::-1], seconds):
            left -= pool.lengths[index]
            pool.drop(index)
            pieces.append((first, degree, [index]))
            room = max(0, self.capacity - held_at_most(pool.lengths[index], degree)) if degree > 1 else 0
            end = first + degree  # these ranks have nothing else yet
            free[first:end], rooms[first:end] = [max(0.0, free[first] - ring_seconds)] * degree, [room] * degree
            first, done = end, done + pool.seconds[index]
        return pieces, free, rooms, done, left

    def _cut_within(self, cut: NDArray[np.int64], seconds: float) -> Iterator[tuple[int, int, float]]:
        """Yield (index, degree, seconds) of sequences cut to take no longer, until the line is full."""
        least, room = self.least[cut], self.ranks
        if not self.cost.chooses_by_degree:  # cutting never reduces the arithmetic
            work = self.alone[cut] / max(_without_launch(seconds, self.launch), 1e-300) * (1 - 1e-9)
            least = np.maximum(least, np.ceil(np.minimum(work, self.ranks + 1)).astype(np.int64))
        while room and len(cut):
            cut, least = cut[least <= room], least[least <= room]
            count = max(_AT_ONCE, int(np.searchsorted(np.cumsum(least), room, side="right")))
            some, lengths = cut[:count], self.lengths[cut[:count]]
            if len(new := some[self._rows[some] < 0]):
                self._rows[new] = self._prices.rows(self.lengths[new])
            degrees, took = self._prices.within(seconds, lengths, self._rows[some], least[:count], room)
            for index, degree, ring_seconds in zip(some.tolist(), degrees.tolist(), took.tolist(), strict=True):
                if degree <= room:
                    room -= degree
                    yield index, degree, ring_seconds
            cut, least = cut[count:], least[count:]


class _RingPrices:
    """Prices of sequences over the degrees that hold them, for all waves of a step; few ranks keep them."""

    def __init__(self, cost: Cost, ranks: int) -> None:
        self._cost, self._degrees = cost, np.arange(1, ranks + 1)
        self._rows: dict[int, int] = {}  # by length
        self._seconds = np.zeros((0, ranks)) if ranks <= _MOST_KEPT else None

    def within(
        self,
        seconds: float,
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        least: NDArray[np.int64],
        room: int,
    ) -> tuple[NDArray[np.int64], Floats]:
        """Return each sequence's cheapest degree <= `room` within `seconds`, or `room` + 1, and its time there.

        `seconds` include the launch, the returned time does not.
        """
        if self._seconds is None:
            degrees = DegreeTable(self._cost, lengths, least, np.full_like(lengths, room)).within(seconds)
            return degrees, self._cost.ring_piece_seconds(lengths, np.minimum(degrees, room))
        rings, each = self._seconds[rows, :room], np.arange(len(lengths))
        ends, limit = rings + self._cost.fixed_seconds, seconds * (1 + ROUNDING)  # in favour of the smaller degree
        held = self._degrees[:room] >= least[:, None]
        if self._cost.chooses_by_degree:
            held &= (self._degrees[:room] == least[:, None]) | (ends[each, least - 1] > limit)[:, None]
            degrees = 1 + np.argmin(np.where(held & (ends <= limit), self._degrees[:room] * ends, np.inf), axis=1)
        else:
            degrees = 1 + np.argmax(held & (ends <= limit), axis=1)
        is_found = (ends[each, degrees - 1] <= limit) & (degrees >= least)
        return np.where(is_found, degrees, room + 1), rings[each, degrees - 1]

    def rows(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows with the prices of these lengths; price new ones."""
        if self._seconds is None:
            return lengths
        new = sorted({each for each in lengths.tolist() if each not in self._rows})
        if new:
            self._rows |= {length: len(self._rows) + number for number, length in enumerate(new)}
            repeated = np.repeat(np.array(new, dtype=np.int64), len(self._degrees))
            made = self._cost.ring_piece_seconds(repeated, np.tile(self._degrees, len(new)))
            self._seconds = np.concatenate((self._seconds, made.reshape(len(new), -1)))
        return np.array([self._rows[each] for each in lengths.tolist()], dtype=np.int64)


def _without_launch(seconds: float, launch_seconds: float) -> float:
    """Return a limit minus the overhead, rounded up: beside a large overhead digits are lost."""
    left, rounding = seconds - launch_seconds, 1e-15 * seconds
    return left + rounding if rounding > 1e-12 * left else left
