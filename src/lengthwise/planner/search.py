"""The planner of this package: degrees from a target, rings as gangs, packs to level; the best of a few targets.

1. The bound T tells what is worth aiming at (`bounds`).
2. For each of a few levels, T, a little more and fractions of it, every sequence is cut just so far that it takes no
   longer (`degrees`), or a little further, so that as many rings as before fill the line of ranks side by side with no
   rank left over. A little more than T matters where wide rings leave no room for the next one beside them: 20 rings
   of 613 among 12,288 ranks leave 28 for twenty of 7, and end 1.13 above the bound; at 1.02 T all fit side by side.
3. Rings are placed on the line of ranks in four ways: the longest degree or the longest time first, each where it
   starts earliest, the former also with narrower rings in the holes that wider ones leave (`gangs`), or place by place,
   each ring as wide as its place asks for (`valleys`).
4. Where the rings and an even share of the rest promise to end near T, short sequences fill the gaps that rings leave,
   then level the ends (`packs`), at last by exchanges between the last rank to finish and the first (`swaps`: prolong
   on 64 ranks 1.0001 of the bound, 1.0006 without). What promises less waits until nothing better is left.
5. The schedule that ends first is kept; of equal ones the first tried, which has the fewest cuts.

Tries are counted, never timed: the plan depends on nothing but its inputs. Small steps are tried in every way, large
ones, which level better, in a few: 54,845 sequences on 12,288 ranks are placed and packed once or twice.
The fewest ranks that hold a sequence are the wrong goal: one sequence would set the makespan, and all ranks wait.
Widening rings to fill the line is worth most where few fit side by side: 16M tokens of byted on 64 ranks end 1.016 to
1.07 above the bound without it, 1.0001 with it. No one width fills it where rings of many widths meet: clipped to 400K
tokens, a dozen sequences need 25 of 64 ranks each. Two leave 14 ranks beside them, the last leaves 39 at the end, and
degrees chosen beforehand fit neither: these batches ended at 1.08 to 1.18 of the bound. Place by place it is 1.0006.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import held_at_most
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.planner.placement.line import PlacedRings, Ring, place_rings
from lengthwise.planner.placement.packs import LocalPack, Rooms, ShortSequences, fill_gaps, level_ends
from lengthwise.planner.placement.skyline import Moldable, fill_valleys
from lengthwise.planner.placement.uneven import level_uneven_ends
from lengthwise.planner.problem.degrees import (
    GROWTH_FLOOR_TOKENS,
    Growth,
    degree_growth,
    filling_degrees,
    grown_degrees,
    most_degrees,
    rounded_down,
    stacking_degrees,
)
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import interval_microbatch

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)  # of the bound, that a sequence may take
_HALVINGS = 6  # levels tried between the bound and the best so far
_NEAR = 1.003  # of the bound; below it no level above the bound is tried
_GOOD_ENOUGH = 1.0006  # of the bound; further tries could gain no more than this
_LEVEL = 1.0004  # of the bound; ends are levelled down to it
_PROMISING = 1.001  # of the bound; what could end within it is packed at once
_FAR = 1.01  # of the bound; above it smaller shards are tried
_CROWDED = 4  # rings a rank; where so many follow each other, places are looked at before rings
_PLACING_STEPS = 100_000  # rings x thousands of ranks, placed in all
_UNEVEN = 4  # times that a ring counts where each place has a pace of its own
_PACKING_STEPS = 4_000  # sequences packed in all, and at least two tries
_OVERDRAFT = 4  # times as many more while the best is far from the bound

Way = Literal["widest", "backfilled", "longest", "valleys"]
ORDERED_WAYS: tuple[Way, ...] = ("widest", "backfilled", "longest")


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
class Placed:
    """A candidate whose rings are on the line; `least_seconds`: it cannot end earlier, however well it is packed."""

    candidate: Candidate
    seconds: NDArray[np.float64]  # of each sequence at its degree, launch left out
    line: PlacedRings
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where everything runs."""

    line: PlacedRings
    packs: list[LocalPack]
    makespan_seconds: float


def plan_lengthwise(request: PlanRequest) -> list[Microbatch]:
    """Plan one step for the least makespan."""
    search = Search(request)
    for floor_tokens in _floors_tokens(request):
        search.try_floor(floor_tokens)
        if search.over or search.best_seconds <= request.bound_seconds * _FAR:
            break
    assert search.best is not None, "no level was tried"
    return write_schedule(search.best, request)


def _floors_tokens(request: PlanRequest) -> Iterator[int]:
    """Yield how few tokens growth may leave on a rank; each is tried only if the one before ends far from the bound.

    Where a rank holds less than the usual floor, blocks are small anyway and the floor follows the capacity. A floor at
    which one sequence alone already ends too late is left out.
    """
    floor = min(GROWTH_FLOOR_TOKENS, max(1, request.cluster.capacity_tokens // 2))
    lengths, ranks, limit = request.lengths, request.cluster.ranks, request.bound_seconds * _PROMISING
    while floor > 1:
        most = most_degrees(lengths, request.least_degrees, ranks, floor)
        degrees = grown_degrees(request.cost, lengths, request.least_degrees, most, limit, only=request.useful_degrees)
        slowest = request.cost.ring_piece_seconds(lengths, degrees).max() + request.cost.fixed_seconds
        if slowest <= limit * (1 + 1e-9):
            yield floor
        floor //= 2
    yield 1


class Search:
    """Candidates, tried until one is good enough or the budget is spent."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.bound = request, request.bound_seconds
        self.best: Schedule | None = None
        self.best_seconds = float("inf")
        self._tried, self._packed = set[bytes](), set[bytes]()
        self._crowded = False
        self._placing = _PLACING_STEPS // (1 if request.speeds is None else _UNEVEN)
        self._packing = max(_PACKING_STEPS, 2 * len(request.tokens))
        self._overdraft = _OVERDRAFT * self._packing

    @property
    def over(self) -> bool:
        """Whether no further try is worth it."""
        overdraft = self._overdraft if self.best_seconds > self.bound * _FAR else 0
        spent = self.best is not None and (self._placing <= 0 or self._packing <= -overdraft)
        return spent or self.best_seconds <= self.bound * (_FAR if self._crowded else _GOOD_ENOUGH)

    def try_floor(self, floor_tokens: int) -> None:
        """Try the levels of one floor: the bound itself, then between it and the best so far, then fractions of it."""
        lengths, ranks = self.request.lengths, self.request.cluster.ranks
        least, only = self.request.least_degrees, self.request.useful_degrees
        most = most_degrees(lengths, least, ranks, floor_tokens)
        most = most if only is None else rounded_down(most, least, only)
        grown = degree_growth(self.request.cost, lengths, least, most, only=only)
        self._try_level(1.0, grown, most)
        low = 1.0
        for _ in range(_HALVINGS):
            high = self.best_seconds / self.bound if self.bound else 1.0
            if self.over or high <= _NEAR:
                break
            level = (low + high) / 2
            self._try_level(level, grown, most)
            if self.best_seconds >= high * self.bound:
                low = level
        for level in FRACTIONS:
            self._try_level(level, grown, most)

    def _try_level(self, level: float, grown: Growth, most: NDArray[np.int64]) -> None:
        """Try the candidates of one level: at once what promises much, the others afterwards."""
        if self.over:
            return
        waiting: list[Placed] = []
        same_as_before: list[Ring] | None = None
        for candidate in _candidates(self.request, level * self.bound, grown, most):
            if self.over:
                return
            if candidate.key in self._tried:
                continue
            self._tried.add(candidate.key)
            placed = place(self.request, candidate)
            self._placing -= len(placed.line.rings) * (1 + self.request.cluster.ranks // 1000)
            if placed.line.rings == same_as_before:
                continue  # no hole was left to backfill, or none was filled
            same_as_before = placed.line.rings
            self._crowded = is_crowded(self.request, candidate.degrees)
            if placed.least_seconds <= self.bound * (_FAR if self._crowded else _PROMISING):
                self._pack(placed)
            else:
                waiting.append(placed)
        for placed in sorted(waiting, key=lambda placed: placed.least_seconds):
            if self.over:
                return
            self._pack(placed)

    def _pack(self, placed: Placed) -> None:
        if placed.least_seconds >= self.best_seconds:
            return
        if self._is_known(placed):
            self._packing -= len(self.request.tokens) // 2  # a try all the same, or small steps would make hundreds
            return
        self._packing -= len(self.request.tokens)
        schedule = pack(self.request, placed)
        if schedule.makespan_seconds < self.best_seconds:
            self.best, self.best_seconds = schedule, schedule.makespan_seconds

    def _is_known(self, placed: Placed) -> bool:
        """Tell whether rings that leave the same gaps and ends, on whichever ranks, were packed before."""
        line = placed.line
        alike = np.sort if self.request.speeds is None else np.asarray  # on ranks of unequal speed it matters on which
        key = alike(line.free).tobytes() + alike(line.gaps.seconds).tobytes() + placed.candidate.degrees.tobytes()
        known = key in self._packed
        self._packed.add(key)
        return known


def _candidates(
    request: PlanRequest, limit_seconds: float, grown_within: Growth, most: NDArray[np.int64]
) -> Iterator[Candidate]:
    """Yield what to try where no sequence should take longer than `limit_seconds`."""
    only, grown = request.useful_degrees, grown_within(limit_seconds)
    if grown.max() == 1:
        yield Candidate(degrees=grown, most=grown, way="widest")
        return
    crowded = is_crowded(request, grown)
    filling = filling_degrees(grown, most, request.cluster.ranks)
    filling = filling if only is None else rounded_down(filling, grown, only)
    valleys = Candidate(degrees=grown, most=most if only is None else grown, way="valleys")
    if crowded:
        yield valleys
    for way in ORDERED_WAYS:
        yield Candidate(degrees=grown, most=grown, way=way)
    if not crowded:
        yield valleys
        stacking = stacking_degrees(request.cost, request.lengths, grown, most, limit_seconds)
        stacking = stacking if only is None else rounded_down(stacking, grown, only)
        for way in ORDERED_WAYS:
            yield Candidate(degrees=stacking, most=stacking, way=way)
    for way in ORDERED_WAYS:
        yield Candidate(degrees=filling, most=filling, way=way)


def is_crowded(request: PlanRequest, degrees: NDArray[np.int64]) -> bool:
    """Tell whether so many rings follow each other that only `valleys` keeps the line full, and in a fraction of time.

    2,163 rings on 64 ranks (files of the standard library) end 1.07 to 1.21 of the bound placed ring by ring in any
    order, 1.00001 place by place.
    """
    return bool(np.count_nonzero(degrees > 1) >= _CROWDED * request.cluster.ranks)


def place(request: PlanRequest, candidate: Candidate) -> Placed:
    """Put rings on the line by degree and then time; `longest`: by time and then degree."""
    lengths, cost, degrees, ranks = request.lengths, request.cost, candidate.degrees, request.cluster.ranks
    seconds = cost.ring_piece_seconds(lengths, degrees)
    is_placed = (degrees > 1) | (lengths > request.cluster.capacity_tokens)  # what is offloaded on one rank is alone
    cut = np.flatnonzero(is_placed)
    keys = (seconds[cut], degrees[cut]) if candidate.way == "longest" else (degrees[cut], seconds[cut])
    order = cut[np.lexsort((cut, -keys[1], -keys[0]))]
    rows = order.tolist(), degrees[order].tolist()
    if candidate.way == "valleys":
        freedom = candidate.most[order].tolist(), seconds[order].tolist()
        moldable = [
            Moldable(sequence=i, length=request.tokens[i], degree=degree, most=most, seconds=alone)
            for i, degree, most, alone in zip(*rows, *freedom, strict=True)
        ]
        line = fill_valleys(moldable, request.ground, cost)
    else:
        timed = list(zip(*rows, (seconds[order] + cost.fixed_seconds).tolist(), strict=True))
        request.ground.prepare(lengths[cut], degrees[cut])
        line = place_rings(
            timed, ranks, backfilled=candidate.way == "backfilled", extra_seconds=request.ring_extra_seconds
        )
    local, capacity = ~is_placed, request.cluster.capacity_tokens
    rest, rest_tokens = float(seconds[local].sum()), float(lengths[local].sum())
    if cost.fixed_seconds:
        rooms = sum(room * ring.degree for room, ring in zip(_room_tokens(request, line), line.rings, strict=False))
        rest += cost.fixed_seconds * max(0.0, rest_tokens - rooms) / capacity
    return Placed(
        candidate=candidate,
        seconds=seconds,
        line=line,
        least_seconds=max(float(line.free.max()), (line.kept_seconds(request.speeds) + rest) / ranks * (1 - 1e-12)),
    )


def _room_tokens(request: PlanRequest, line: PlacedRings) -> list[int]:
    """Tell what each ring leaves of the capacity of its ranks.

    Empty where nothing may stand beside rings.
    """
    if not request.packs_beside_rings:
        return []
    capacity, tokens = request.cluster.capacity_tokens, request.tokens
    if not request.ground.has_shares:
        return [max(0, capacity - held_at_most(tokens[ring.sequence], ring.degree)) for ring in line.rings]
    most = (request.ground.most_held_tokens(tokens[ring.sequence], ring.first, ring.degree) for ring in line.rings)
    return [max(0, capacity - tokens) for tokens in most]


def pack(request: PlanRequest, placed: Placed) -> Schedule:
    """Put short sequences beside rings, into gaps and onto the ends."""
    lengths, seconds, line = request.lengths, placed.seconds, placed.line
    local = np.flatnonzero((placed.candidate.degrees == 1) & (lengths <= request.cluster.capacity_tokens))
    ascending = local[np.lexsort((-local, lengths[local]))]
    short = ShortSequences(ascending.tolist(), lengths[ascending].tolist(), seconds[ascending].tolist())
    launch_seconds, capacity = request.cost.fixed_seconds, request.cluster.capacity_tokens
    rooms = Rooms(line.last.tolist(), _room_tokens(request, line))
    limits = {"capacity_tokens": capacity, "launch_seconds": launch_seconds, "rooms": rooms}
    speeds = request.speeds
    if speeds is not None:
        gaps = replace(line.gaps, seconds=line.gaps.seconds * np.array(speeds)[line.gaps.ranks])  # in work, as packs
        in_gaps = fill_gaps(gaps, short, **limits)
        at_ends, makespan = level_uneven_ends(line.free.tolist(), speeds, short, **limits)
        return Schedule(line=line, packs=in_gaps + at_ends, makespan_seconds=makespan)
    in_gaps = fill_gaps(line.gaps, short, **limits)
    goal_seconds = request.bound_seconds * _LEVEL
    at_ends, makespan = level_ends(line.free.tolist(), short, **limits, goal_seconds=goal_seconds)
    return Schedule(line=line, packs=in_gaps + at_ends, makespan_seconds=makespan)


def write_schedule(schedule: Schedule, request: PlanRequest) -> list[Microbatch]:
    """Write a schedule as microbatches in one global order."""
    before: dict[int | None, list[Microbatch]] = {}
    beside: dict[int, dict[int, list[int]]] = {}
    for pack in schedule.packs:
        if pack.beside is None:
            before.setdefault(pack.before, []).append(interval_microbatch(pack.rank, 1, pack.sequences))
        else:
            beside.setdefault(pack.beside, {})[pack.rank] = pack.sequences
    microbatches: list[Microbatch] = []
    for number, ring in enumerate(schedule.line.rings):
        microbatches += before.get(number, [])
        shares = request.ground.shares(request.tokens[ring.sequence], ring.first, ring.degree)
        microbatch = interval_microbatch(ring.first, ring.degree, [ring.sequence], shares)
        local = [Piece(ranks=(rank,), sequences=tuple(own)) for rank, own in sorted(beside.get(number, {}).items())]
        microbatches.append(Microbatch(pieces=(*microbatch.pieces, *local)) if local else microbatch)
    return microbatches + before.get(None, [])
