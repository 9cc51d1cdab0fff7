"""The line of ranks as rings find it: nodes and relative speeds make some places slower than others.

A ring that crosses a node's border takes the far link. It runs at its slowest rank's speed, or, with shares, at the
mean. Seconds at any speed are interpolated in 1 / speed over a small grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import held_at_most
from lengthwise.cost import Cost
from lengthwise.cost.links import Numbers, chosen
from lengthwise.planner.problem.effort import TOLD_APART
from lengthwise.planner.problem.step_lengths import NEARLY, ROUNDING

_LOST = 4  # weight of the time that fast ranks lose at a place; with 0, `halves` end 1.9 % further behind
_ROUNDED = 2  # tokens by which a rank's two chunks may exceed its share
_ALLOWED = 6  # tokens that bounds allow a rank above its capacity: the plan file's one, and rounding of its work
_STEPS = 128  # steps of a rank's capacity in which bounds price rings
_LOOKED_AT = 2048  # ranks; up to here bounds examine every place of every ring
_AT_ONCE = 2**20  # speeds in one array

Floats = NDArray[np.float64]


class RingPlaces(NamedTuple):
    """All places of rings of one degree; one entry per first rank.

    crosses: True where such a ring crosses a border of nodes that it could avoid.
    slowest, mean, fastest: relative speeds of its ranks.
    """

    first: NDArray[np.int64]
    crosses: NDArray[np.bool_]
    slowest: Floats
    mean: Floats
    fastest: Floats

    def at(self, some: slice | int) -> RingPlaces:
        """Return some of the places."""
        return RingPlaces._make(each[some] for each in self)


class Extras:
    """Seconds that each first rank adds to a ring. find: returns (seconds, seconds with fast ranks' loss)."""

    def __init__(self, find: Callable[[slice | int], tuple[Numbers, Numbers]]) -> None:
        self._find = find

    @cached_property
    def _all(self) -> tuple[Floats, Floats]:
        return self._find(slice(None))

    @property
    def seconds(self) -> Floats:
        """The seconds that each first rank adds."""
        return self._all[0]

    @property
    def compared(self) -> Floats:
        """The seconds that each first rank adds, with the time that its fast ranks lose."""
        return self._all[1]

    def at(self, first: int) -> float:
        """Return the seconds that one place adds."""
        return float(self._find(first)[0])


class CostAtSpeed:
    """Prices of rings, each at its own relative speed, times its own weight.

    choose: function that returns speed and weight for a sequence's share of the ranks' capacity, 0 to 1, and a degree.
    """

    def __init__(self, cost: Cost, choose: Callable[[float, int], tuple[float, float]], capacity_tokens: int) -> None:
        self._cost, self._choose, self._capacity = cost, choose, capacity_tokens
        self._chosen: dict[tuple[int, int], tuple[Cost, float]] = {}
        self.chooses_by_degree = cost.chooses_by_degree

    @property
    def fixed_seconds(self) -> float:
        """The launch of the fastest rank."""
        return self._of(0, 1)[0].fixed_seconds

    def ring_piece_seconds(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> Floats:
        """Price rings as `Cost` does, each at its speed and weight."""
        filled = np.minimum(_STEPS * lengths // (self._capacity * degrees), _STEPS)
        pairs, numbers = np.unique(np.stack((filled, degrees)), axis=1, return_inverse=True)
        seconds = np.zeros(len(lengths))
        for number, (step, degree) in enumerate(pairs.T.tolist()):
            some = numbers.ravel() == number
            cost, weight = self._of(step, degree)
            seconds[some] = weight * cost.ring_piece_seconds(lengths[some], degrees[some])
        return seconds

    def _of(self, step: int, degree: int) -> tuple[Cost, float]:
        key = step, degree
        if key not in self._chosen:
            speed, weight = self._choose(step / _STEPS, degree)
            self._chosen[key] = self._cost.at_speed(speed), weight
        return self._chosen[key]


class Topology:
    """Seconds that the places of the line add to those of a ring by `cost`, with its launch.

    Args:
        cost: costs of a rank of speed 1.
        ranks: number of ranks of the line.
        speeds: relative speed of each rank, with mean 1; None if all are equal.
        capacity_tokens: tokens per rank; shares stay within it.
    """

    def __init__(self, cost: Cost, ranks: int, speeds: Sequence[float] | None = None, capacity_tokens: int = 0) -> None:
        self.ranks, self.speeds = ranks, None if speeds is None else np.array(speeds)
        self._capacity = capacity_tokens
        self._ranks_per_node = ranks
        self._widest = ranks  # rings up to here are slower in more nodes than they need
        self._costs: list[Cost] = [cost]  # and, if nodes matter, the same costs with every ring across a border
        shared = cost.shares_uplinks
        if (cost.near != cost.far or shared) and cost.ranks_per_node < ranks:
            self._costs.append(replace(cost, crosses_node=True))
            self._ranks_per_node = cost.ranks_per_node
            self._widest = cost.ranks_per_node * (2 if shared else 1)  # over two nodes: one message leaves each
        self._grid = np.ones(1) if self.speeds is None else _some_of(self.speeds)
        self._grid_slownesses = 1 / self._grid
        self._grid_costs = [each.at_speeds(self._grid[:, None]) for each in self._costs]
        self._known: dict[tuple[int, int], tuple[float, Floats]] = {}  # of a ring: seconds by `cost`, by cost and speed
        self._places: dict[int, RingPlaces] = {}

    @property
    def is_level(self) -> bool:
        """Whether all places are equal for every ring."""
        return self.speeds is None and len(self._costs) == 1

    def prepare(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> None:
        """Price many rings at once, before they are needed one by one."""
        some = np.flatnonzero((degrees > 1) & ((degrees <= self._widest) | (self.speeds is not None)))
        if self.is_level or len(some) == 0:
            return
        lengths, degrees = lengths[some], degrees[some]
        seconds = [each.ring_piece_seconds(lengths, degrees) for each in self._grid_costs]
        promised = seconds[0][0] if self.speeds is None else self._costs[0].ring_piece_seconds(lengths, degrees)
        keys = zip(lengths.tolist(), degrees.tolist(), strict=True)
        values = zip(promised.tolist(), np.moveaxis(np.array(seconds), 2, 0), strict=True)
        self._known.update(zip(keys, values, strict=True))

    def extra_seconds(self, length: int, degree: int) -> Extras | None:
        """Return the seconds of a ring at each first rank beyond the costs; None if there are none."""
        if self.is_level or degree < 2 or (self.speeds is None and degree > self._widest):
            return None
        key = length, degree
        if key not in self._known:
            self.prepare(np.array([length]), np.array([degree]))
        promised, seconds = self._known[key]
        if self.speeds is None:
            penalty = float(seconds[1, 0]) - promised
            return Extras(partial(self._added_by_border, degree, penalty)) if penalty > 0 else None
        return Extras(partial(self._added_by_speeds, length, degree))

    def _added_by_border(self, degree: int, penalty: float, some: slice | int) -> tuple[Numbers, Numbers]:
        """Return the seconds that places across a node's border add, twice."""
        extra = chosen(self.places(degree).crosses[some], penalty, 0.0)
        return extra, extra

    def _added_by_speeds(self, length: int, degree: int, some: slice | int) -> tuple[Numbers, Numbers]:
        """Return the seconds that places add to a ring, and these plus the time that fast ranks lose."""
        (promised, seconds), places = self._known[length, degree], self.places(degree).at(some)
        slownesses = 1 / self._ring_speeds(length, degree, self._capacity - _ROUNDED, places)
        rings = [np.interp(slownesses, self._grid_slownesses, row) for row in seconds]
        launches = self._costs[0].fixed_seconds * (1 / places.slowest - 1)
        took = rings[0] if len(rings) == 1 else chosen(places.crosses, rings[1], rings[0])
        extra = took - promised + launches
        return extra, extra + _LOST * took * (places.mean * slownesses - 1)

    def places(self, degree: int) -> RingPlaces:
        """Return all intervals of `degree` ranks."""
        if degree not in self._places:
            firsts = np.arange(self.ranks - degree + 1)
            fewest = -(-degree // self._ranks_per_node) * self._ranks_per_node  # ranks of the fewest nodes
            crosses = (firsts % self._ranks_per_node + degree > fewest) & (degree <= self._widest)
            speeds = np.ones(self.ranks) if self.speeds is None else self.speeds
            self._places[degree] = RingPlaces(
                first=firsts,
                crosses=crosses,
                slowest=-window_max(-speeds, degree),
                mean=window_sum(speeds, degree) / degree,
                fastest=window_max(speeds, degree),
            )
        return self._places[degree]

    def shares(self, length: int, first: int, degree: int) -> list[float] | None:
        """Return each rank's part of a sequence at a place, in line order; None if all are equal."""
        if self.speeds is None or degree < 2:
            return None
        speeds = self.speeds[first : first + degree]
        most = float(speeds.max())
        if speeds.min() == most:
            return None
        if length * most <= (self._capacity - _ROUNDED) * float(speeds.sum()):
            return (speeds / most).tolist()
        parts = levelled(speeds[None], (self._capacity - _ROUNDED) / length)[0][0]
        return None if parts.min() == parts.max() else (parts / parts.max()).tolist()

    def most_held_tokens(self, length: int, first: int, degree: int) -> int:
        """Return an upper bound of the tokens of a sequence on any rank of a place."""
        shares = self.shares(length, first, degree)
        if shares is None:
            return held_at_most(length, degree)
        return math.ceil(length * max(shares) / sum(shares)) + _ROUNDED

    @cached_property
    def best_places(self) -> CostAtSpeed:
        """Costs of rings at their fastest place, for bounds: no place and no shares make them faster."""

        def speed_and_weight(filled: float, degree: int) -> tuple[float, float]:
            return float(self._all_speeds(filled * degree * self._capacity, degree).max()), 1.0

        return CostAtSpeed(self._costs[0], speed_and_weight, self._capacity)

    @cached_property
    def least_spent(self) -> CostAtSpeed:
        """The rank-seconds, in seconds of a rank of speed 1, that rings of this degree or more take.

        If a ring is slower than its ranks' mean, fast ranks wait: at least by the least share of any place.
        """
        assert self.speeds is not None, "where ranks are alike rings keep what the costs say"
        lowest = float(self.speeds.min())

        def speed_and_weight(filled: float, degree: int) -> tuple[float, float]:
            return lowest, lowest * self._least_lost(filled * degree * self._capacity, degree)

        return CostAtSpeed(self._costs[0], speed_and_weight, self._capacity)

    def _least_lost(self, length: float, degree: int) -> float:
        """Return the time that rings of this degree or more occupy ranks, over their work; 1 without waits."""
        if self.ranks > _LOOKED_AT or self._all_speeds(length, self.ranks)[0] > 1 - NEARLY:
            return 1.0
        some = range(max(degree, math.ceil(length / (self._capacity + _ALLOWED))), self.ranks + 1)
        return min(float((self.places(each).mean / self._all_speeds(length, each)).min()) for each in some)

    def _all_speeds(self, length: float, degree: int) -> Floats:
        """Return the speed of a ring at each place, with the memory that bounds allow a rank."""
        return self._ring_speeds(length, degree, self._capacity + _ALLOWED, self.places(degree))

    def _ring_speeds(self, length: float, degree: int, capacity_tokens: float, places: RingPlaces) -> Floats:
        """Return the speed of a ring at each place, with up to `capacity_tokens` on a rank."""
        is_tight = length * places.fastest > capacity_tokens * degree * places.mean
        if not is_tight.any():
            return places.mean
        assert self.speeds is not None, "ranks that are alike have no speeds"
        ring_speeds, first = np.array(places.mean, ndmin=1), np.atleast_1d(places.first)
        tight = np.flatnonzero(is_tight)
        for some in np.array_split(tight, 1 + len(tight) * degree // _AT_ONCE):
            speeds = self.speeds[first[some, None] + np.arange(degree)]
            ring_speeds[some] = 1 / (degree * levelled(speeds, capacity_tokens / length)[1])
        return ring_speeds.reshape(is_tight.shape)


def levelled(speeds: Floats, most: float) -> tuple[Floats, Floats]:
    """Divide a whole over ranks so that the last is done earliest, no part above `most`; each row is a ring.

    Return the parts, and the time of the last rank of each row; parts are equal if even equal ones exceed `most`.
    """
    degree = speeds.shape[1]
    if most * degree <= 1:
        return np.full_like(speeds, 1 / degree), 1 / (degree * speeds.min(axis=1))
    order = np.argsort(-speeds, axis=1, kind="stable")
    fast = np.take_along_axis(speeds, order, axis=1)
    slower = np.cumsum(fast[:, ::-1], axis=1)[:, ::-1]  # the sum of this speed and all below
    times = (1 - most * np.arange(degree)) / slower  # of the others, with this many ranks full
    full = np.argmax(fast * times <= most * (1 + ROUNDING), axis=1)
    time = np.take_along_axis(times, full[:, None], axis=1)
    return np.minimum(most, speeds * time), time[:, 0]


def window_max(values: Floats, width: int) -> Floats:
    """Return the largest of every `width` neighbours, by doubling."""
    span, largest = 1, values
    while 2 * span <= width:
        largest = np.maximum(largest[:-span], largest[span:])
        span *= 2
    rest = width - span
    return np.maximum(largest[:-rest], largest[rest:]) if rest else largest


def window_sum(values: Floats, width: int) -> Floats:
    """Return the sum of every `width` neighbours."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[width:] - sums[:-width]


def _some_of(speeds: Floats) -> Floats:
    """Return the speeds at which to price rings, fastest first."""
    distinct = np.unique(speeds)
    if len(distinct) > TOLD_APART:
        distinct = 1 / np.linspace(1 / distinct[0], 1 / distinct[-1], TOLD_APART)
    return np.sort(distinct)[::-1]
