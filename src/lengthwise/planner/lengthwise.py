"""The planner of this package: degrees from a target, rings as gangs, packs to level; the best of a few targets.

1. The bound T tells what is worth aiming at (`bounds`).
2. For each of a few fractions of T, every sequence is cut just so far that it takes no longer (`degrees`), or a
   little further, so that as many rings as before fill the line of ranks side by side with no rank left over.
3. Rings are placed on the line of ranks in three ways: the longest degree or the longest time first, each where it
   starts earliest (`gangs`), or place by place, each ring as wide as its place asks for (`valleys`).
4. Short sequences fill the gaps that rings leave, then level the ends (`packs`).
5. The schedule that ends first is kept; of equal ones the first tried, which has the fewest cuts.

A ring of d ranks among N costs O(N log d); a few thousand sequences on a thousand ranks take about a second in all.
The fewest ranks that hold a sequence are the wrong goal: one sequence would set the makespan, and all ranks wait.
Widening rings to fill the line is worth most where few fit side by side: 16M tokens of byted on 64 ranks end 1.016 to
1.07 above the bound without it, 1.0001 with it. No one width fills it where rings of many widths meet: clipped to 400K
tokens, a dozen sequences need 25 of 64 ranks each. Two leave 14 ranks beside them, the last leaves 39 at the end, and
degrees chosen beforehand fit neither: these batches ended at 1.08 to 1.18 of the bound. Place by place it is 1.0006.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.planner.bounds import bound_seconds
from lengthwise.planner.degrees import GROWTH_FLOOR_TOKENS, filling_degrees, grown_degrees, most_degrees
from lengthwise.planner.gangs import Ring, place_rings
from lengthwise.planner.packs import ShortSequences, fill_gaps, level_ends
from lengthwise.planner.request import PlanRequest, least_degrees_held
from lengthwise.planner.rings import interval_microbatch
from lengthwise.planner.valleys import Moldable, fill_valleys

LEVELS = (1.0, 0.5, 0.25, 0.125)  # fractions of the bound that a sequence may take
_GOOD_ENOUGH = 1.0002  # of the bound; further tries could gain no more than this
_FAR = 1.01  # of the bound; above it smaller shards are tried

Way = Literal["widest", "longest", "valleys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What to try: a degree for each sequence, how far `valleys` may widen it, and how rings are placed."""

    degrees: NDArray[np.int64]
    most: NDArray[np.int64]
    way: Way

    @property
    def key(self) -> bytes:
        """The same bytes for the same schedule."""
        return self.way.encode() + self.degrees.tobytes() + self.most.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where everything runs: gap packs come before ring number `before`, end packs after all rings."""

    rings: list[Ring]
    gap_packs: list[tuple[int, int, list[int]]]  # (before, rank, sequences)
    end_packs: list[tuple[int, list[int]]]  # (rank, sequences)
    makespan_seconds: float


def plan_lengthwise(request: PlanRequest) -> list[Microbatch]:
    """Plan one step for the least makespan."""
    bound = bound_seconds(request.tokens, request.cluster, request.cost)
    best: Schedule | None = None
    tried: set[bytes] = set()
    for floor_tokens in _floors_tokens(request.cluster.capacity_tokens):
        if best is not None and best.makespan_seconds <= bound * _FAR:
            break
        for candidate in _candidates(request, bound, floor_tokens, tried):
            schedule = make_schedule(request, candidate)
            if best is None or schedule.makespan_seconds < best.makespan_seconds:
                best = schedule
            if best.makespan_seconds <= bound * _GOOD_ENOUGH:
                break
    assert best is not None, f"no level of {LEVELS} was tried"
    return write_schedule(best)


def _floors_tokens(capacity_tokens: int) -> tuple[int, int]:
    """List how few tokens growth may leave on a rank; the second is tried only if the first ends far from the bound.

    Where a rank holds less than the usual floor, blocks are small anyway and the floor follows the capacity.
    """
    floor = min(GROWTH_FLOOR_TOKENS, max(1, capacity_tokens // 2))
    return floor, max(1, floor // 2)


def _candidates(request: PlanRequest, bound: float, floor_tokens: int, tried: set[bytes]) -> Iterator[Candidate]:
    """Yield what to try, each once, also over several floors."""
    lengths, ranks = request.lengths, request.cluster.ranks
    least = least_degrees_held(lengths, request.cluster.capacity_tokens)
    most = most_degrees(lengths, least, ranks, floor_tokens)
    for level in LEVELS:
        grown = grown_degrees(request.cost, lengths, least, most, level * bound)
        filling = filling_degrees(grown, most, ranks)
        candidates = (
            Candidate(degrees=grown, most=grown, way="widest"),
            Candidate(degrees=grown, most=grown, way="longest"),
            Candidate(degrees=grown, most=most, way="valleys"),
            Candidate(degrees=filling, most=filling, way="widest"),
            Candidate(degrees=filling, most=filling, way="longest"),
        )
        for candidate in candidates:
            if candidate.key not in tried and (candidate.way == "widest" or np.any(candidate.degrees > 1)):
                tried.add(candidate.key)
                yield candidate


def make_schedule(request: PlanRequest, candidate: Candidate) -> Schedule:
    """Schedule sequences at given degrees; rings go by degree and then time, except `longest`: time and then degree."""
    lengths, cost, degrees = request.lengths, request.cost, candidate.degrees
    seconds = cost.ring_piece_seconds(lengths, degrees)
    cut = np.flatnonzero(degrees > 1)
    keys = (seconds[cut], degrees[cut]) if candidate.way == "longest" else (degrees[cut], seconds[cut])
    order = cut[np.lexsort((cut, -keys[1], -keys[0]))].tolist()
    if candidate.way == "valleys":
        moldable = [
            Moldable(sequence=i, length=request.tokens[i], degree=int(degrees[i]), most=int(candidate.most[i]))
            for i in order
        ]
        rings, gaps, free = fill_valleys(moldable, request.cluster.ranks, cost)
    else:
        timed = [(i, int(degrees[i]), float(seconds[i]) + cost.fixed_seconds) for i in order]
        rings, gaps, free = place_rings(timed, request.cluster.ranks)
    local = np.flatnonzero(degrees == 1)
    ascending = local[np.lexsort((-local, lengths[local]))]
    short = ShortSequences(ascending.tolist(), lengths[ascending].tolist(), seconds[ascending].tolist())
    limits = {"capacity_tokens": request.cluster.capacity_tokens, "launch_seconds": cost.fixed_seconds}
    gap_packs = fill_gaps(gaps, short, **limits)
    end_packs = level_ends(free.tolist(), short, **limits)
    for rank, pack in end_packs:
        free[rank] += cost.fixed_seconds + float(seconds[pack].sum())
    return Schedule(
        rings=rings,
        gap_packs=[(gap.before, gap.rank, pack) for gap, pack in gap_packs],
        end_packs=end_packs,
        makespan_seconds=float(free.max()),
    )


def write_schedule(schedule: Schedule) -> list[Microbatch]:
    """Write a schedule as microbatches in one global order."""
    before: dict[int, list[Microbatch]] = {}
    for ring, rank, pack in schedule.gap_packs:
        before.setdefault(ring, []).append(interval_microbatch(rank, 1, pack))
    microbatches: list[Microbatch] = []
    for number, ring in enumerate(schedule.rings):
        microbatches += before.get(number, [])
        microbatches.append(interval_microbatch(ring.first, ring.degree, [ring.sequence]))
    return microbatches + [interval_microbatch(rank, 1, pack) for rank, pack in schedule.end_packs]
