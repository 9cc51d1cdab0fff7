"""Skyline packing: the ranks free earliest take the widest ring that fits, widened so that none is left over.

Stretches too narrow for any ring are left to local packs. O(log N) per ring. Source: Burke et al., 2004.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.cost import Cost
from lengthwise.planner.placement.line import PlacedRings, RankLine, at_place
from lengthwise.planner.problem.step_lengths import NEARLY
from lengthwise.planner.problem.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Moldable:
    """A sequence to cut over `degree` to `most` ranks. seconds: time over `degree` ranks, without launch."""

    sequence: int
    length: int
    degree: int
    most: int
    seconds: float


class Skyline:
    """Stretches of neighbouring ranks that are free at the same time."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.height = {0: 0.0}  # when a stretch is free, by its first rank
        self.end = {0: ranks}  # the end of a stretch, by its first rank
        self.first = {ranks: 0}  # the first rank of a stretch, by its end
        self._heap = [(0.0, 0)]

    def lowest(self) -> tuple[int, int, float]:
        """Return the stretch that is free earliest, the first of equal ones, as (first, end, seconds)."""
        while True:
            height, first = self._heap[0]
            if self.height.get(first) == height:
                return first, self.end[first], height
            heapq.heappop(self._heap)

    def neighbours(self, first: int, end: int) -> tuple[float, float]:
        """Return the times at which the left and right neighbours of a stretch are free; infinity beyond the line."""
        left = self.height[self.first[first]] if first > 0 else float("inf")
        return left, self.height[end] if end < self.ranks else float("inf")

    def put(self, first: int, end: int, height: float) -> None:
        """Set the time at which one end of a stretch is free, and join it with neighbours free at the same time."""
        begin = first if first in self.height else self.first[end]
        stop, old = self.end[begin], self.height[begin]
        self._remove(begin)
        if begin < first:
            self._add(begin, first, old)
        if end < stop:
            self._add(end, stop, old)
        left, right = self.neighbours(first, end)
        joined = height
        if abs(left - height) <= NEARLY * height:
            first, joined = self._remove(self.first[first])[0], max(joined, left)
        if abs(right - height) <= NEARLY * height:
            end, joined = self._remove(end)[1], max(joined, right)
        self._add(first, end, joined)

    def _add(self, first: int, end: int, height: float) -> None:
        self.height[first], self.end[first], self.first[end] = height, end, first
        heapq.heappush(self._heap, (height, first))

    def _remove(self, first: int) -> tuple[int, int]:
        end = self.end.pop(first)
        del self.height[first], self.first[end]
        return first, end


def pack_skyline(rings: Sequence[Moldable], topology: Topology, cost: Cost) -> PlacedRings:
    """Place rings given widest first."""
    ranks = topology.ranks
    left_over, narrowness = list(rings), [-ring.degree for ring in rings]
    skyline = Skyline(ranks)
    line = RankLine(ranks)  # free below the skyline if a stretch was too narrow for any ring
    while left_over:
        first, end, height = skyline.lowest()
        left, right = skyline.neighbours(first, end)
        number = bisect_left(narrowness, first - end)
        if number == len(left_over):
            skyline.put(first, end, min(left, right))
            continue
        ring = left_over.pop(number)
        del narrowness[number]
        width, seconds = _mold(ring, end - first, cost)
        extra = topology.extra_seconds(ring.length, width)
        at_left, at_right = at_place(extra, first), at_place(extra, end - width)
        top = height + seconds
        nearest = abs(right - top) < abs(left - top)  # if both ends are as fast: beside the neighbour nearer in time
        if at_right < at_left or (at_right == at_left and nearest):
            first, at_left = end - width, at_right
        skyline.put(first, first + width, line.put(ring.sequence, first, width, seconds + at_left))
    return line.placed()


def _mold(ring: Moldable, room: int, cost: Cost) -> tuple[int, float]:
    """Widen a ring to its share of the room if that is faster; return width and seconds with overhead."""
    width = max(ring.degree, min(room // (room // ring.degree), ring.most))
    if width > ring.degree and (wider := cost.piece_seconds([ring.length], width)) < ring.seconds:
        return width, wider + cost.fixed_seconds
    return ring.degree, ring.seconds + cost.fixed_seconds
