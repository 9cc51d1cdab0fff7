"""Shelves of rings, for ranks that are pipelines: rings of similar length follow each other on the same ranks.

A ring of t seconds costs t and, if nothing as long runs before it, (p - 1) / v of t to fill the stages. Degrees grow
for a few levels of the bound; bisection finds the least limit that holds all rings. docs/decisions/pipeline-slots.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.planner.placement.line import at_place
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.step_lengths import NEARLY
from lengthwise.planner.problem.topology import window_max
from lengthwise.planner.schedules.microbatch_slots import COARSE, MicrobatchSlots
from lengthwise.program.ring_order import interval_microbatch
from lengthwise.program.stage_clocks import slot_clocks

LEVELS = (0.06, 0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # shares of the bound that a sequence may take
_PRECISE = 0.004  # relative precision of the limit: plans end 0.5 to 5 % after it

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelves:
    """Rings as (sequence, first rank, degree, seconds) in plan order, and the end of each rank's last ring.

    limit_seconds: limit on placement's clocks, rather early. end_seconds: end of all stages with even local work.
    """

    degrees: NDArray[np.int64]
    rings: list[tuple[int, int, int, float]]
    free: Floats
    limit_seconds: float
    end_seconds: float = inf


def plan_shelves(request: PlanRequest, most_seconds: float = inf) -> list[Shelves]:
    """List shelves for `request.stages` stages per rank that should end before `most_seconds`, fastest first."""
    grown = request.growth(request.lengths, request.least_degrees).grown
    found: list[Shelves] = []
    tried, limit = set[bytes](), most_seconds
    for level in LEVELS:
        degrees = grown(level * request.bound_seconds)
        if degrees.tobytes() not in tried:
            tried.add(degrees.tobytes())
            found += Shelving(request, degrees, counts_filling=True).found(limit)
            limit = min([limit, *(each.limit_seconds * COARSE for each in found)])
    if found:
        best = min(found, key=lambda each: each.end_seconds)
        sooner = Shelving(request, best.degrees, counts_filling=False)
        placed = sooner.placed(best.limit_seconds)
        found += [] if placed is None else [sooner.timed(placed)]
    return sorted(found, key=lambda each: each.end_seconds)


def write_shelves(request: PlanRequest, shelves: Shelves) -> list[Microbatch]:
    """Level the ends with local sequences, the longest slots first; return rings, then slots."""
    rest = _Local(request, shelves.degrees)
    rings = [interval_microbatch(first, degree, [i]) for i, first, degree, _ in shelves.rings]
    needed = rest.slots(_left_seconds(shelves.free, rest.all_seconds))
    while True:
        counts = np.ceil(needed)[:, None]
        number = np.arange(int(counts.max()) + 1)
        weights = np.asarray(1 - NEARLY * number, dtype=np.float64)  # decreasing
        slots = MicrobatchSlots(request.cluster.ranks, weights, [], request.cluster.capacity_tokens)
        slots.rooms[number >= counts] = 0
        launched = shelves.free + counts[:, 0] * request.cost.fixed_seconds
        left = _left_seconds(launched, float(rest.seconds.sum()))[:, None]
        targets = np.where(number < counts, weights * left / np.maximum(counts, 1.0), 0.0)
        if slots.fill(request.lengths[rest.sequences], rest.seconds, targets):
            return rings + slots.microbatches(rest.sequences)
        needed = needed * COARSE


def _left_seconds(free: Floats, seconds: float) -> Floats:
    """Divide seconds among ranks so that all that are free earlier end together."""
    rising = np.sort(free)
    ends = (np.cumsum(rising) + seconds) / np.arange(1, len(rising) + 1)
    return np.maximum(ends.min() - free, 0.0)


class _Local:
    """The sequences of one rank each, longest first, and the time they take after the rings."""

    def __init__(self, request: PlanRequest, degrees: NDArray[np.int64]) -> None:
        cost, lengths, capacity = request.cost, request.lengths, request.cluster.capacity_tokens
        self.is_local = (degrees == 1) & (lengths <= capacity)  # a longer one on one rank offloads, and is alone
        local = np.flatnonzero(self.is_local)
        self.sequences = local[np.lexsort((local, -lengths[local]))]
        self.seconds = cost.compute_seconds(lengths[self.sequences])
        self.all_slots = float(lengths[local].sum()) / capacity
        self.all_seconds = float(self.seconds.sum()) + self.all_slots * cost.fixed_seconds

    def slots(self, seconds: Floats) -> Floats:
        """Return the number of full slots in these seconds; if nothing costs time, an even share of all."""
        if self.all_seconds:
            return seconds * (self.all_slots / self.all_seconds)
        return seconds + self.all_slots / len(seconds)


class Shelving:
    """Places sequences at chosen degrees. counts_filling: True if filling new ranks counts as lost time."""

    def __init__(self, request: PlanRequest, degrees: NDArray[np.int64], *, counts_filling: bool) -> None:
        self._request, self._degrees = request, degrees
        self._fill = request.cut.fill  # of a first microbatch, for which its ranks wait for stages
        self._lost_fill = self._fill if counts_filling else 0.0
        self._local = local = _Local(request, degrees)
        seconds = request.cost.ring_piece_seconds(request.lengths, degrees) + request.cost.fixed_seconds
        cut = np.flatnonzero(~local.is_local)
        order = cut[np.lexsort((cut, -seconds[cut], -degrees[cut]))]
        self._order = list(zip(order.tolist(), degrees[order].tolist(), seconds[order].tolist(), strict=True))
        request.topology.prepare(request.lengths[cut], degrees[cut])
        self._pack_fill_seconds = self._fill * local.all_seconds / max(local.all_slots, 1.0)
        work = float(degrees[cut] @ seconds[cut]) + local.all_seconds
        longest = (1 + self._fill) * float(seconds[cut].max(initial=0.0))
        self._least_seconds = max(work / request.cluster.ranks, longest, self._pack_fill_seconds)

    def found(self, most_seconds: float) -> list[Shelves]:
        """Place the rings within ever lower limits below `most_seconds`, down to about the least that holds all."""
        least = low = self._least_seconds
        limits = (least * COARSE ** (2**step - 1) for step in count()) if most_seconds == inf else [most_seconds]
        first = next((placed for limit in limits if (placed := self.placed(limit)) is not None), None)
        found = [] if first is None else [first]
        while found and found[-1].limit_seconds > low + _PRECISE * least:
            limit = (low + found[-1].limit_seconds) / 2
            if (placed := self.placed(limit)) is None:
                low = limit
            else:
                found.append(placed)
        return [self.timed(each) for each in found[-2:]]

    def placed(self, limit_seconds: float) -> Shelves | None:
        """Place rings so that each ends within a limit; None if one cannot, or if packs then end later."""
        ranks, most = self._request.cluster.ranks, limit_seconds * (1 + NEARLY)
        free, is_empty, has_empty = np.zeros(ranks), np.ones(ranks, dtype=np.bool_), True
        total = np.zeros(ranks + 1)
        up_to, rings = total[1:], list[tuple[int, int, int, float]]()
        for sequence, degree, seconds in self._order:
            extra = self._request.ring_extra_seconds(sequence, degree)
            when = spent = free
            if has_empty:  # an empty rank's stages must fill first
                when = np.where(is_empty, self._fill * seconds, free)
                spent = np.where(is_empty, (self._fill - self._lost_fill) * seconds, free)
            starts = window_max(when, degree)
            np.cumsum(spent, out=up_to)
            lost = (degree - NEARLY) * starts - (total[degree:] - total[:-degree])
            if extra is None:
                lost[starts > most - seconds] = inf
            else:
                lost += degree * extra.seconds
                lost[starts + extra.seconds > most - seconds] = inf
            first = int(lost.argmin())
            if lost[first] == inf:
                return None
            took = seconds + at_place(extra, first)
            free[first : first + degree] = starts[first] + took
            rings.append((sequence, first, degree, took))
            if has_empty:
                is_empty[first : first + degree] = False
                has_empty = bool(is_empty.any())
        free[is_empty] = self._pack_fill_seconds
        if max(float(free.max()), (float(free.sum()) + self._local.all_seconds) / ranks) > most:
            return None
        return Shelves(degrees=self._degrees, rings=rings, free=free, limit_seconds=limit_seconds)

    def timed(self, shelves: Shelves) -> Shelves:
        """Run rings, then local work in even slots, through all stages; then level late ranks once more."""
        best, free = shelves, shelves.free
        for _ in range(2):
            left = _left_seconds(free, self._local.all_seconds)
            ends = self._ends(shelves, left)
            if ends.max() < best.end_seconds:
                best = replace(shelves, free=free, end_seconds=float(ends.max()))
            free = np.where(left > 0, ends - left, free)
        return best

    def _ends(self, shelves: Shelves, left: Floats) -> Floats:
        request, slots = self._request, np.ceil(self._local.slots(left)).astype(np.int64)
        last = np.full(request.cluster.ranks, -1, dtype=np.int64)
        placed: list[tuple[int, slice, float]] = []
        for _, first, degree, seconds in shelves.rings:
            interval = slice(first, first + degree)
            last[interval] = slot = int(last[interval].max()) + 1
            placed.append((slot, interval, seconds))
        number = np.arange(int((last + slots).max()) + 1)[:, None]
        is_own = (number > last) & (number <= last + slots)
        grid, is_first = np.where(is_own, left / np.maximum(slots, 1), 0.0), np.ones(is_own.shape, dtype=np.bool_)
        for slot, interval, seconds in placed:
            grid[slot, interval] = seconds
            is_first[slot, interval.start + 1 : interval.stop] = False
        forward = request.cost.forward_share("none") * grid
        return slot_clocks(forward, grid - forward, is_first, request.cut)
