"""Rings for ranks that are pipelines: in columns, like lengths on the same ranks, each no wider than the one before.

A stage waits for the longest of its neighbours. So a ring of t seconds costs its ranks t, and, where nothing as long
runs before it, (p - 1) / v of t more: the time to fill and drain their stages. Rings that follow on the same ranks and
are no longer cost t alone. `lengthwise` places for ranks without stages, and nearly every ring is filled anew: Mixtral
8x22B in two stages on 768 ranks (github, 256K) ended at 1.99 s, in columns it is 1.78 s. The clocks of this module, one
number a rank, tell the end that `score` finds to 1 to 3 %.

1. Degrees are grown for a few levels of the bound: what takes longest decides how long filling takes.
2. Rings go, widest first, to the interval that loses least, waiting and filling counted, of those on which they end
   within a limit; of equal ones to the one that is free last. The limit is halved down to the least that holds all.
   All is tried again with waiting alone counted, which opens new columns sooner: eight of ten batches of 8x22B end
   0.2 to 2 % earlier for it.
3. Packs level the ends, the longest first on each rank. The levels that promise most are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.planner.placement.level_ends import level_ends
from lengthwise.planner.placement.line import at_place
from lengthwise.planner.placement.short_sequences import ShortSequences
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.topology import window_max
from lengthwise.program.ring_order import interval_microbatch

LEVELS = (1.0, 0.5, 0.25, 0.12, 0.06)  # of the bound, that a sequence may take
_WIDENED = 1.03  # times the least limit, then the square of that and so on, until all rings fit
_BISECTIONS = 5
_NEARLY = 1 - 1e-6  # of the best so far: the last limit that is tried, or wide steps would pass it by
_PLACING_STEPS = 15_000  # rings x thousands of ranks, placed in all
_ROUNDING = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Rings as (sequence, first rank, degree) in the order of the plan, and when each rank's last one is done."""

    degrees: NDArray[np.int64]
    rings: list[tuple[int, int, int]]
    free: Floats
    end_seconds: float


def plan_columns(request: PlanRequest, least_seconds: float = inf) -> Iterator[list[Microbatch]]:
    """Yield plans for `request.stages` stages of each rank that should end before `least_seconds`.

    The clocks of this module are rather early, so none is left out that would end before it.
    """
    known: list[list[tuple[int, int, int]]] = []
    for counts_filling in (True, False):
        search = ColumnSearch(request, counts_filling=counts_filling, least_seconds=least_seconds)
        found = [columns for level in LEVELS if (columns := search.at_level(level)) is not None]
        best = min(found, key=lambda each: each.end_seconds, default=None)
        if best is not None and best.rings not in known:
            known.append(best.rings)
            yield search.written(best)


class ColumnSearch:
    """Levels, tried until the budget is spent."""

    def __init__(self, request: PlanRequest, *, counts_filling: bool, least_seconds: float = inf) -> None:
        self._request, self._counts_filling = request, counts_filling
        self._fill = (request.stages - 1) / request.virtual
        self._best_seconds = least_seconds
        self._steps = _PLACING_STEPS
        self._tried = set[bytes]()
        self._grown = request.growth(request.lengths, request.least_degrees).grown

    def at_level(self, level: float) -> Columns | None:
        """Place the rings of a level within the least limit; None if it was tried, or cannot end before the best."""
        degrees = self._grown(level * self._request.bound_seconds)
        if degrees.tobytes() in self._tried or self._steps <= 0:
            return None
        self._tried.add(degrees.tobytes())
        found = _Level(self._request, degrees, self._fill, counts_filling=self._counts_filling)
        low = limit = found.least_seconds
        widened, most = _WIDENED, self._best_seconds
        while (best := self._placed(found, limit) if limit < most else None) is None:
            if limit >= most * _NEARLY:
                return None
            limit, widened = min(limit * widened, most * _NEARLY), widened * widened
        for _ in range(_BISECTIONS if best.end_seconds > low else 0):
            limit = (low + best.end_seconds) / 2
            placed = self._placed(found, limit)
            low, best = (limit, best) if placed is None else (low, placed)
        self._best_seconds = min(self._best_seconds, best.end_seconds)
        return best

    def _placed(self, level: _Level, limit_seconds: float) -> Columns | None:
        self._steps -= len(level.order) * (1 + self._request.cluster.ranks // 1000)
        return level.placed(limit_seconds)

    def written(self, columns: Columns) -> list[Microbatch]:
        """Pack what is local onto the ends, and write rings and packs in the order that they run in."""
        request = self._request
        lengths, cost, capacity = request.lengths, request.cost, request.cluster.capacity_tokens
        local = np.flatnonzero(_is_local(request, columns.degrees))
        ascending = local[np.lexsort((-local, lengths[local]))]
        seconds = cost.compute_seconds(lengths[ascending])
        short = ShortSequences(ascending.tolist(), lengths[ascending].tolist(), seconds.tolist())
        limits = {"capacity_tokens": capacity, "launch_seconds": cost.fixed_seconds}
        packs, _ = level_ends(columns.free.tolist(), short, **limits, goal_seconds=columns.end_seconds)
        of_sequence = dict(zip(short.sequences, short.seconds, strict=True))
        packs.sort(key=lambda pack: -sum(of_sequence[i] for i in pack.sequences))
        rings = [interval_microbatch(first, degree, [i]) for i, first, degree in columns.rings]
        return rings + [interval_microbatch(pack.rank, 1, pack.sequences) for pack in packs]


class _Level:
    """Sequences at chosen degrees; `fill`: of a first microbatch's seconds, that its ranks wait for their stages."""

    def __init__(self, request: PlanRequest, degrees: NDArray[np.int64], fill: float, *, counts_filling: bool) -> None:
        self._request, self._degrees, self._fill = request, degrees, fill
        self._lost_fill = fill if counts_filling else 0.0
        cost, ranks, capacity = request.cost, request.cluster.ranks, request.cluster.capacity_tokens
        seconds = cost.ring_piece_seconds(request.lengths, degrees) + cost.fixed_seconds
        local = _is_local(request, degrees)
        cut = np.flatnonzero(~local)
        order = cut[np.lexsort((cut, -seconds[cut], -degrees[cut]))]
        self.order = list(zip(order.tolist(), degrees[order].tolist(), seconds[order].tolist(), strict=True))
        request.topology.prepare(request.lengths[cut], degrees[cut])
        packs = float(request.lengths[local].sum()) / capacity
        self._rest_seconds = float(cost.compute_seconds(request.lengths[local]).sum()) + packs * cost.fixed_seconds
        self._pack_fill_seconds = fill * self._rest_seconds / max(packs, 1.0)
        work = float(degrees[cut] @ seconds[cut]) + self._rest_seconds
        longest = (1 + fill) * float(seconds[cut].max(initial=0.0))
        self.least_seconds = max(work / ranks, longest, self._pack_fill_seconds)

    def placed(self, limit_seconds: float) -> Columns | None:
        """Place rings so that each ends within a limit; None if one cannot, or if packs then end later."""
        ranks, most = self._request.cluster.ranks, limit_seconds * (1 + _ROUNDING)
        free, rings = np.zeros(ranks), []
        for sequence, degree, seconds in self.order:
            extra = self._request.ring_extra_seconds(sequence, degree)
            filling = self._fill * seconds, self._lost_fill * seconds
            place = _place(free, degree, seconds, filling, most, None if extra is None else extra.seconds)
            if place is None:
                return None
            first, start = place
            free[first : first + degree] = start + seconds + at_place(extra, first)
            rings.append((sequence, first, degree))
        free = np.where(free == 0, self._pack_fill_seconds, free)
        end_seconds = max(float(free.max()), (float(free.sum()) + self._rest_seconds) / ranks)
        if end_seconds > most:
            return None
        return Columns(degrees=self._degrees, rings=rings, free=free, end_seconds=limit_seconds)


def _place(
    free: Floats,
    degree: int,
    seconds: float,
    filling: tuple[float, float],
    limit_seconds: float,
    extra: Floats | None,
) -> tuple[int, float] | None:
    """Find where a ring of at most the length of those before it loses least; return its first rank and its start.

    Ranks without work are filled first: `filling` is how long that takes, and what of it counts as lost. `extra`: what
    each first rank adds to `seconds`.
    """
    is_empty = free == 0
    when = np.where(is_empty, filling[0], free)
    starts = window_max(when, degree)
    filled, empty = _window_sums(when, degree), _window_sums(is_empty.astype(np.float64), degree)
    lost = degree * starts - filled + empty * filling[1]
    ends = starts + seconds
    if extra is not None:
        ends, lost = ends + extra, lost + degree * extra
    lost = np.where(ends <= limit_seconds, lost, np.inf)
    least = float(lost.min())
    if least == np.inf:
        return None
    equal = np.flatnonzero(lost <= least + _ROUNDING * limit_seconds)
    first = int(equal[np.argmax(starts[equal])])
    return first, float(starts[first])


def _window_sums(values: Floats, width: int) -> Floats:
    total = np.concatenate((np.zeros(1), np.cumsum(values)))
    return total[width:] - total[:-width]


def _is_local(request: PlanRequest, degrees: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which sequences may share packs of one rank: what is offloaded there is alone."""
    return (degrees == 1) & (request.lengths <= request.cluster.capacity_tokens)
