"""Degrees of sequences: what memory needs, grown until the sequence no longer sets the makespan.

A table holds the seconds over d ranks, for every degree up to 64, then in steps of a 64th; within a limit the least
d t(d) is taken. 64 log2(N) entries per row.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner.problem.step_lengths import ROUNDING, least_degrees_held

GROWTH_FLOOR_TOKENS = 4096  # growth stops here: attention blocks under 2K tokens run slower than the formula says
_EVERY = 64  # the grid has all degrees up to here, above it steps of a 64th of the degree

Whole = NDArray[np.int64]


class RingPrices(Protocol):
    """Costs of rings for the search of degrees: `Cost` or `CostAtSpeed`."""

    @property
    def fixed_seconds(self) -> float:
        """Seconds that a microbatch takes on each of its ranks."""
        ...

    @property
    def chooses_by_degree(self) -> bool:
        """Whether a piece may take fewer rank-seconds when it is cut further."""
        ...

    def ring_piece_seconds(self, lengths: Whole, degrees: Whole) -> NDArray[np.float64]:
        """Return seconds of pieces of one sequence: entry i is `lengths[i]` over `degrees[i]` ranks."""
        ...


class DegreeTable:
    """Seconds of sequences, launch included, over a grid of degrees in [least, most].

    only: degrees to choose from, ascending (default: all).
    launch_tokens: tokens that a shared launch carries; a sequence then pays its share of launches, if that is less.
    """

    def __init__(
        self,
        cost: RingPrices,
        lengths: Whole,
        least: Whole,
        most: Whole,
        *,
        only: Whole | None = None,
        launch_tokens: int | None = None,
    ) -> None:
        self._cost, self._lengths, self._least, self.most = cost, lengths, least, most
        self._only, self._launch_tokens = only, launch_tokens
        self._falls = cost.chooses_by_degree
        self._quickest = np.zeros(len(lengths), dtype=np.int64)  # 0: not computed yet
        self._made = np.inf  # the smallest limit for which rows were made

    @cached_property
    def _at_least(self) -> NDArray[np.float64]:
        return self.seconds_at(self._lengths, self._least)

    def within(self, seconds: float) -> Whole:
        """Return each sequence's cheapest degree that ends within `seconds`, or most + 1 if there is none."""
        limit = seconds * (1 + ROUNDING)  # in favour of the smaller degree
        slow, degrees = self._at_least > limit, self._least.copy()
        if np.any(slow):
            if limit < self._made:
                self._made = limit
                self._make_rows(np.flatnonzero(slow))
            degrees[self._rows] = np.where(slow[self._rows], self._refined(limit), self._least[self._rows])
        return np.where(self._least <= self.most, degrees, self.most + 1)

    def cheapest(self) -> Whole:
        """Return the degree at which each sequence takes the fewest rank-seconds, launches included."""
        self._make_rows(np.arange(len(self._lengths)))
        rows, column = np.arange(len(self._lengths)), np.argmin(self._taken, axis=1)
        best, least = self._degrees[rows, column], self._taken[rows, column]
        low = self._degrees[rows, np.maximum(column - 1, 0)] + 1
        high = self._degrees[rows, np.minimum(column + 1, self._degrees.shape[1] - 1)] - 1
        for step in range(int((high - low).max(initial=-1)) + 1 if self._only is None else 0):
            degrees = np.clip(low + step, self._least, np.maximum(high, self._least))
            taken = self._taken_at(degrees, self.seconds_at(self._lengths, degrees), self._lengths)
            better = (taken < least) | ((taken == least) & (degrees < best))
            best, least = np.where(better, degrees, best), np.where(better, taken, least)
        return best

    def grown(self, seconds: float) -> Whole:
        """Return degrees at which no sequence takes longer than `seconds`, or its fastest degree."""
        degrees = self.within(seconds)
        slow = degrees > self.most
        if np.any(new := slow & (self._quickest == 0)):
            part = self._lengths[new], self._least[new], self.most[new]
            self._quickest[new] = DegreeTable(self._cost, *part, only=self._only).quickest()
        return np.where(slow, self._quickest, degrees)

    def quickest(self) -> Whole:
        """Return the fastest degree of the grid for each sequence."""
        self._make_rows(np.arange(len(self._lengths)))
        return self._degrees[np.arange(len(self._lengths)), np.argmin(self._seconds, axis=1)]

    def seconds_at(self, lengths: Whole, degrees: Whole) -> NDArray[np.float64]:
        """Return the seconds of each sequence at its degree, launch included."""
        return self._cost.ring_piece_seconds(lengths, degrees) + self._cost.fixed_seconds

    def _taken_at(self, degrees: Whole, seconds: NDArray[np.float64], lengths: Whole) -> NDArray[np.float64]:
        """Return the rank-seconds of sequences, or just their degree if rank-seconds grow with it."""
        if not self._falls:
            return degrees.astype(np.float64)
        if self._launch_tokens is None:
            return degrees * seconds
        shared = np.minimum(degrees, lengths / self._launch_tokens)
        return degrees * seconds - self._cost.fixed_seconds * (degrees - shared)

    def _make_rows(self, rows: Whole) -> None:
        self._rows = rows
        least, most = self._least[rows], self.most[rows]
        lowest, highest = int(least.min(initial=1)), int(most.max(initial=1))
        grid = _grid(lowest, highest) if self._only is None else self._only
        # Columns outside a row's range repeat its least or most degree, so these two are always included.
        self._degrees = np.clip(np.broadcast_to(grid, (len(rows), len(grid))), least[:, None], most[:, None])
        flat, lengths = self._degrees.ravel(), np.repeat(self._lengths[rows], len(grid))
        self._seconds = self.seconds_at(lengths, flat).reshape(self._degrees.shape)
        self._taken = self._taken_at(self._degrees, self._seconds, self._lengths[rows][:, None])

    def _refined(self, limit: float) -> Whole:
        """Return the cheapest degree within the limit, refined by bisection, or most + 1 if there is none."""
        rows, lengths = np.arange(len(self._rows)), self._lengths[self._rows]
        column = np.argmin(np.where(self._seconds <= limit, self._taken, np.inf), axis=1)
        found = self._seconds[rows, column] <= limit
        high = self._degrees[rows, column]
        before = np.maximum(column - 1, 0)
        low = np.where(self._seconds[rows, before] > limit, self._degrees[rows, before], high)  # too slow
        while self._only is None and len(some := np.flatnonzero(found & (high - low > 1))):
            middle = (low[some] + high[some]) // 2
            ends = self.seconds_at(lengths[some], middle) <= limit
            high[some], low[some] = np.where(ends, middle, high[some]), np.where(ends, low[some], middle)
        return np.where(found, high, self.most[self._rows] + 1)


@lru_cache(maxsize=256)
def _grid(least: int, most: int) -> Whole:
    degrees = list(range(least, min(most, max(_EVERY, least)) + 1))
    while degrees and degrees[-1] < most:
        step = 1 << max(0, (degrees[-1] // _EVERY).bit_length() - 1)
        degrees.append(min(most, (degrees[-1] // step + 1) * step))
    return np.array(degrees or [least], dtype=np.int64)  # shared by all callers


def fewest_degrees(cost: Cost, lengths: Whole, cluster: Cluster) -> Whole:
    """Return the fewest ranks that hold each sequence, with all offload that these costs allow."""
    return least_degrees_held(lengths, cost.most_held_tokens(cluster.capacity_tokens))


def cheapest_degrees(
    cost: Cost, lengths: Whole, cluster: Cluster, *, only: Whole | None = None, launch_tokens: int | None = None
) -> Whole:
    """Return the degree of each sequence, among those that hold it, with the fewest rank-seconds, launch included."""
    fewest = fewest_degrees(cost, lengths, cluster)
    if not cost.chooses_by_degree:
        return fewest
    held = least_degrees_held(lengths, cluster.capacity_tokens)
    if cost.choices.splits_heads:
        held = (
            np.where(held > 1, cluster.ranks, 1)
            if only is None
            else only[np.minimum(np.searchsorted(only, held), len(only) - 1)]
        )
    most = np.maximum(fewest, np.minimum(held, cluster.ranks))
    chosen, long = fewest.copy(), np.flatnonzero(most > 1)
    table = DegreeTable(cost, lengths[long], fewest[long], most[long], only=only, launch_tokens=launch_tokens)
    chosen[long] = table.cheapest()
    return chosen


def hidden_degrees(cost: Cost, lengths: Whole, cluster: Cluster) -> Whole:
    """Return the fewest ranks that hold each sequence if compute hides its offload: Eq. 3 of ByteScale."""
    low, high = fewest_degrees(cost, lengths, cluster), least_degrees_held(lengths, cluster.capacity_tokens)
    if not cost.choices.offloads:
        return high
    high = np.minimum(high, cluster.ranks)
    while np.any(low < high):
        middle = (low + high) // 2
        free = cost.hides_copies(lengths, middle)
        low, high = np.where(free, low, np.minimum(middle + 1, high)), np.where(free, middle, high)
    return high


def useful_degrees(cost: Cost, ranks: int) -> Whole | None:
    """Return the degrees worth a try with split heads, or None for all."""
    if not cost.choices.splits_heads:
        return None
    node = cost.ranks_per_node
    powers = {1 << power for power in range(node.bit_length()) if 1 << power <= min(node, ranks)}
    return np.array(sorted(powers | {*range(node, ranks + 1, node), ranks}), dtype=np.int64)


def most_degrees(lengths: Whole, least: Whole, ranks: int, floor_tokens: int, *, only: Whole | None = None) -> Whole:
    """Return the limit of growth: about `floor_tokens` per rank, at least `least`, rounded down to one of `only`."""
    most = np.minimum(np.maximum(least, lengths // floor_tokens), ranks)
    return most if only is None else np.maximum(least, only[np.searchsorted(only, most, side="right") - 1])
