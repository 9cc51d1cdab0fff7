"""Rings on the line of ranks, widest first: list scheduling of tasks that need neighbouring ranks together.

Each ring takes the interval in which it ends earliest, or, with backfilling, a hole that wider ones left; gaps are left
to local packs. One ring costs a few array operations over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.planner.problem.effort import OPEN
from lengthwise.planner.problem.step_lengths import ROUNDING
from lengthwise.planner.problem.topology import Extras, window_max, window_sum


class Ring(NamedTuple):
    """One sequence over the ranks [first, first + degree); a tuple, since a try has thousands."""

    sequence: int
    first: int
    degree: int
    start_seconds: float
    seconds: float  # launch included


class Hole(NamedTuple):
    """Neighbouring ranks [first, end) that wait together from `start_seconds` until `end_seconds`."""

    first: int
    end: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times in which a rank waits for ring `before`, after ring `after` (-1: none); one entry per gap."""

    ranks: NDArray[np.int64]
    after: NDArray[np.int64]
    before: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def longest_first(self, least_seconds: float) -> list[tuple[int, int, int, float]]:
        """List (rank, after, before, seconds) of the gaps of at least `least_seconds`."""
        some = np.flatnonzero(self.seconds >= least_seconds)
        order = some[np.lexsort((self.ranks[some], self.before[some], -self.seconds[some]))]
        columns = (self.ranks, self.after, self.before, self.seconds)
        return list(zip(*(column[order].tolist() for column in columns), strict=True))


@dataclass(frozen=True, kw_only=True)  # without slots, for what is computed once
class PlacedRings:
    """Rings on the line, in the order of their starts, an order that every rank can run.

    free: seconds at which each rank is done. last: number of its last ring, -1 if none.
    """

    rings: list[Ring]
    free: NDArray[np.float64]
    last: NDArray[np.int64]
    gaps: Gaps

    @cached_property
    def busy_seconds(self) -> float:
        """Rank-seconds in rings, waiting left out."""
        return sum(ring.degree * ring.seconds for ring in self.rings)

    def kept_seconds(self, speeds: Sequence[float] | None) -> float:
        """Return `busy_seconds` in seconds of a rank of speed 1."""
        if speeds is None:
            return self.busy_seconds
        sums = [0.0, *accumulate(speeds)]
        return sum(ring.seconds * (sums[ring.first + ring.degree] - sums[ring.first]) for ring in self.rings)


class RankLine:
    """The line of ranks while rings are placed: when each rank is free, and the holes where neighbours wait."""

    def __init__(self, ranks: int) -> None:
        self.free = np.zeros(ranks)
        self.rings: list[Ring] = []
        self._holes: list[Hole] = []

    def put(self, sequence: int, first: int, degree: int, seconds: float) -> float:
        """Run a ring on [first, first + degree) as soon as all are free; return when it ends."""
        part = self.free[first : first + degree]
        start = float(part.max())
        if part.min() < start:
            self._remember_holes(first, part, start)
        end = start + seconds
        part[:] = end
        self.rings.append(Ring(sequence, first, degree, start, seconds))
        return end

    def backfill(self, sequence: int, degree: int, seconds: float, extra: Extras | None) -> bool:
        """Run a ring in the hole that it fills best, by width, then by time; return whether there is one."""
        fitting = [
            (hole.end - hole.first, hole.end_seconds - hole.start_seconds, number)
            for number, hole in enumerate(self._holes)
            if hole.end - hole.first >= degree
            and hole.end_seconds - hole.start_seconds >= seconds + _quicker_end(extra, hole, degree)[0]
        ]
        if not fitting:
            return False
        hole = self._holes.pop(min(fitting)[2])
        more, first = _quicker_end(extra, hole, degree)
        self.rings.append(Ring(sequence, first, degree, hole.start_seconds, seconds + more))
        end = first + degree
        self._holes += [
            Hole(first, end, hole.start_seconds + seconds + more, hole.end_seconds),
            Hole(*((end, hole.end) if first == hole.first else (hole.first, first)), *hole[2:]),
        ]
        return True

    def placed(self) -> PlacedRings:
        """Return the rings in the order of their starts, with the remaining gaps."""
        rings = sorted(self.rings, key=lambda ring: (ring.start_seconds, ring.first))
        widths = np.array([ring.degree for ring in rings], dtype=np.int64)
        numbers = np.repeat(np.arange(len(rings)), widths)
        firsts = np.array([ring.first for ring in rings], dtype=np.int64) - (np.cumsum(widths) - widths)
        ranks = np.arange(len(numbers)) + np.repeat(firsts, widths)
        order = np.argsort(ranks, kind="stable")  # by rank, and on each rank by start
        ranks, numbers = ranks[order], numbers[order]
        starts = np.array([ring.start_seconds for ring in rings])[numbers]
        ends = starts + np.array([ring.seconds for ring in rings])[numbers]
        first_of_rank = np.diff(ranks, prepend=-1) > 0
        after = np.where(first_of_rank, -1, np.roll(numbers, 1))
        waits = starts - np.where(first_of_rank, 0.0, np.roll(ends, 1))
        last = np.full(len(self.free), -1, dtype=np.int64)
        last[ranks] = numbers  # the last ring of a rank is written last
        some = waits > ROUNDING * ends
        gaps = Gaps(ranks=ranks[some], after=after[some], before=numbers[some], seconds=waits[some])
        return PlacedRings(rings=rings, free=self.free, last=last, gaps=gaps)

    def _remember_holes(self, first: int, part: NDArray[np.float64], start: float) -> None:
        borders = np.flatnonzero(np.diff(part, prepend=-1.0)).tolist()
        for begin, end in zip(borders, [*borders[1:], len(part)], strict=True):
            if part[begin] < start and end - begin > 1:
                self._holes.append(Hole(first + begin, first + end, float(part[begin]), start))
        if len(self._holes) > OPEN:
            self._holes.sort(key=lambda hole: -(hole.end - hole.first) * (hole.end_seconds - hole.start_seconds))
            del self._holes[OPEN:]  # the largest are kept


def at_place(extra: Extras | None, first: int) -> float:
    """Return the seconds that a place adds to a ring."""
    return 0.0 if extra is None else extra.at(first)


def place_rings(
    rings: Sequence[tuple[int, int, float]],
    ranks: int,
    *,
    backfilled: bool = False,
    extra_seconds: Callable[[int, int], Extras | None] = lambda _sequence, _degree: None,
) -> PlacedRings:
    """Place rings given as (sequence, degree, seconds with launch), in this order.

    Args:
        rings: widest first.
        ranks: number of ranks of the line.
        backfilled: True to use holes that wider rings left.
        extra_seconds: function of sequence and degree that returns the seconds of each place beyond `seconds`.
    """
    line = RankLine(ranks)
    place = 0
    while place < len(rings):
        degree = rings[place][1]
        end = place + 1
        while end < len(rings) and rings[end][1] == degree:
            end += 1
        while place < end:
            sequence, _, seconds = rings[place]
            extra = extra_seconds(sequence, degree)
            if backfilled and line.backfill(sequence, degree, seconds, extra):
                place += 1
            else:
                most = end if extra is None else place + -(-(end - place) // 2)  # the rest then finds better places
                place += _sweep(line, rings[place:most], extra, extra_seconds)
    return line.placed()


def _sweep(
    line: RankLine,
    rings: Sequence[tuple[int, int, float]],
    extra: Extras | None,
    extra_seconds: Callable[[int, int], Extras | None],
) -> int:
    """Place rings of one degree side by side, as far as one look at the line decides; return their number.

    Places are ordered by what they add to the first of these rings, `extra`.
    """
    degree = rings[0][1]
    starts, idle = _starts_and_idle(line.free, degree)
    least = 0.0  # what the best place adds
    if extra is not None:
        starts, least = starts + extra.compared, float(extra.compared.min())
    taken = bytearray(len(line.free))
    number, soonest_end = 0, float("inf")
    enough = len(rings) * (2 * degree - 1)  # each ring blocks this many places
    some = np.arange(len(starts))
    if enough < len(starts):
        some = np.flatnonzero(starts <= np.partition(starts, enough)[enough])
    order = some[np.lexsort((idle[some], starts[some]))]
    for first, start in zip(order.tolist(), starts[order].tolist(), strict=True):
        if number == len(rings) or start >= soonest_end + least:
            break
        if taken[first] or taken[first + degree - 1]:
            continue
        sequence, _, seconds = rings[number]
        seconds += at_place(extra_seconds(sequence, degree), first)
        soonest_end = min(soonest_end, line.put(sequence, first, degree, seconds))
        taken[first : first + degree] = b"\1" * degree
        number += 1
    return number


def earliest_interval(free: NDArray[np.float64], degree: int) -> tuple[int, float]:
    """Return (first rank, start) where a ring starts earliest; ties: the least waiting, then the lowest."""
    if degree == 1:  # never waits
        first = int(np.argmin(free))
        return first, float(free[first])
    starts, idle = _starts_and_idle(free, degree)
    soonest = np.flatnonzero(starts == starts.min())
    first = int(soonest[np.argmin(idle[soonest])])
    return first, float(starts[first])


def _quicker_end(extra: Extras | None, hole: Hole, degree: int) -> tuple[float, int]:
    """Return (seconds added, first rank) at the faster end of a hole; ties: the lower end."""
    if extra is None:
        return 0.0, hole.first
    return min((float(extra.seconds[first]), first) for first in (hole.first, hole.end - degree))


def _starts_and_idle(free: NDArray[np.float64], degree: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the time at which each interval of `degree` ranks is free, and the summed waiting of its ranks."""
    starts = window_max(free, degree)
    return starts, degree * starts - window_sum(free, degree)
