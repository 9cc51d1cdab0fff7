"""The search of this package: cut sequences to a level, place rings on the line of ranks, pack short sequences.

1. Levels lie between the makespan bound and the best so far; each sequence is cut until it takes no longer than a
level. 2. Rings are placed widest first with backfilling, longest first (`line`), and by skyline packing (`skyline`).
3. Packs of short sequences fill gaps and level the ends (`level_ends`), the most promising placement first.

Tries are counted, never timed. Source: Turek et al., SPAA 1992; docs/decisions/placement-levels.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import held_at_most
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.planner.placement.level_ends import LocalPack, Rooms, fill_gaps, level_ends
from lengthwise.planner.placement.line import PlacedRings, place_rings
from lengthwise.planner.placement.short_sequences import ShortSequences
from lengthwise.planner.placement.skyline import Moldable, pack_skyline
from lengthwise.planner.problem.degrees import DegreeTable
from lengthwise.planner.problem.effort import FAR, GOOD_ENOUGH, TABLE_SECONDS
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.step_lengths import NEARLY, ROUNDING
from lengthwise.program.ring_order import interval_microbatch

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)  # levels, as shares of the bound
_CROWDED = 4  # rings per rank; with more, only the skyline keeps the line full
_STEPS = 20_000  # budget: sequences packed, and rings x thousands of ranks placed; beside two packings (far: six)

Way = Literal["widest", "longest", "skyline"]
WAYS: tuple[Way, ...] = ("widest", "longest", "skyline")  # with many ranks the budget suffices for two


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Rings on the line, one degree per sequence. least_seconds: earliest end once packs are added."""

    degrees: NDArray[np.int64]
    seconds: NDArray[np.float64]  # of each sequence at its degree, launch left out
    line: PlacedRings
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where everything runs, and the makespan."""

    line: PlacedRings
    packs: list[LocalPack]
    makespan_seconds: float


def plan_lengthwise(request: PlanRequest) -> list[Microbatch]:
    """Plan one step for the least makespan; while plans end late, degrees may grow to fewer tokens per rank."""
    search, lengths, limit = ScheduleSearch(request), request.lengths, request.bound_seconds * GOOD_ENOUGH
    for halvings in range(request.floor_tokens.bit_length()):
        table = request.growth(lengths, request.least_degrees, request.floor_tokens >> halvings)
        slowest = request.cost.ring_piece_seconds(lengths, table.grown(limit)).max() + request.cost.fixed_seconds
        if slowest <= limit * (1 + NEARLY) or request.floor_tokens >> halvings == 1:  # else one sequence ends too late
            search.try_degrees(table)
        is_spent = search.best is not None and request.planning_seconds < (halvings + 1) * TABLE_SECONDS
        if search.over or is_spent or search.best_seconds <= request.bound_seconds * FAR:
            break
    assert search.best is not None, "no level was tried"
    return write_schedule(search.best, request)


class ScheduleSearch:
    """Tries schedules until one is good enough or the budget is spent."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.bound = request, request.bound_seconds
        self.best: Schedule | None = None
        self.best_seconds = float("inf")
        self._reached = float("inf")  # the least makespan packed or in reach, as a multiple of the bound
        self._crowded = False
        self._tried = set[bytes]()  # degrees
        self._waiting: list[Placed] = []
        self._left = _STEPS + 2 * len(request.tokens)

    @property
    def over(self) -> bool:
        """Whether no further try is worth it."""
        enough = self.bound * (FAR if self._crowded else GOOD_ENOUGH)
        return self.best_seconds <= enough or (self.best is not None and self._is_spent)

    @property
    def _is_spent(self) -> bool:
        far = self.request.speeds is None and self.best_seconds > self.bound * FAR  # bounds of unequal ranks are low
        return self._left + (4 * len(self.request.tokens) if far else 0) <= 0

    def try_degrees(self, table: DegreeTable) -> None:
        """Try levels with degrees of a table: place all, then pack the most promising first."""
        self._try_level(1.0, table)
        self._halve(table)
        self._pack_waiting()
        if self.best_seconds > self.bound * FAR > 0:  # packing ended later than the placements promised
            self._reached = self.best_seconds / self.bound
            self._halve(table)
            for level in FRACTIONS:
                self._try_level(level, table)
            self._pack_waiting()

    def _halve(self, table: DegreeTable) -> None:
        low = 1.0
        while (high := self._reached) - low > GOOD_ENOUGH - 1 and not self.over:
            level = (low + high) / 2
            self._try_level(level, table)
            low = low if self._reached < high else level

    def _pack_waiting(self) -> None:
        for placed in sorted(self._waiting, key=lambda placed: placed.least_seconds):
            if not self.over:
                self._pack(placed)
        self._waiting.clear()

    def _try_level(self, level: float, table: DegreeTable) -> None:
        """Place rings in each way, pack promising placements, and note the multiple of the bound in reach."""
        request, degrees = self.request, table.grown(level * self.bound)
        if degrees.tobytes() in self._tried:
            return
        self._tried.add(degrees.tobytes())
        self._crowded = bool(np.count_nonzero(degrees > 1) >= _CROWDED * request.cluster.ranks)
        widest = table.most if request.useful_degrees is None else degrees
        seconds = request.cost.ring_piece_seconds(request.lengths, degrees)
        ways = WAYS if degrees.max() > 1 else WAYS[:1]
        for way in reversed(ways) if self._crowded else ways:
            if self.over or (self._is_spent and self._waiting):
                break
            if way == "longest" and self._reached <= GOOD_ENOUGH and request.speeds is None:
                continue
            placed = place(request, degrees, seconds, way, widest)
            self._left -= len(placed.line.rings) * (1 + request.cluster.ranks // 1000)
            reached = placed.least_seconds
            if reached <= self.bound * (FAR if self._crowded else GOOD_ENOUGH):
                self._pack(placed)
                reached = self.best_seconds
            else:
                self._waiting.append(placed)
            self._reached = min(self._reached, reached / self.bound if self.bound else 1.0)

    def _pack(self, placed: Placed) -> None:
        if placed.least_seconds >= self.best_seconds:
            return
        self._left -= len(self.request.tokens)
        schedule = pack(self.request, placed)
        if schedule.makespan_seconds < self.best_seconds:
            self.best, self.best_seconds = schedule, schedule.makespan_seconds


def place(
    request: PlanRequest, degrees: NDArray[np.int64], seconds: NDArray[np.float64], way: Way, widest: NDArray[np.int64]
) -> Placed:
    """Place rings by degree, then `seconds`, and backfill. Way `longest`: by these first; `skyline`: up to `widest`."""
    lengths, cost, ranks = request.lengths, request.cost, request.cluster.ranks
    is_placed = (degrees > 1) | (lengths > request.cluster.capacity_tokens)  # one that offloads on one rank is alone
    cut = np.flatnonzero(is_placed)
    keys = (degrees[cut], seconds[cut]) if way == "longest" else (seconds[cut], degrees[cut])
    order = cut[np.lexsort((cut, -keys[0], -keys[1]))]
    rows = order.tolist(), degrees[order].tolist()
    if way != "skyline":
        timed = list(zip(*rows, (seconds[order] + cost.fixed_seconds).tolist(), strict=True))
        request.topology.prepare(lengths[cut], degrees[cut])
        line = place_rings(timed, ranks, backfilled=way == "widest", extra_seconds=request.ring_extra_seconds)
    else:
        moldable = [
            Moldable(sequence=i, length=request.tokens[i], degree=degree, most=most, seconds=alone)
            for i, degree, most, alone in zip(*rows, widest[order].tolist(), seconds[order].tolist(), strict=True)
        ]
        line = pack_skyline(moldable, request.topology, cost)
    local, capacity = ~is_placed, request.cluster.capacity_tokens
    rest, rest_tokens = float(seconds[local].sum()), float(lengths[local].sum())
    if cost.fixed_seconds:
        rooms = sum(room * ring.degree for room, ring in zip(_room_tokens(request, line), line.rings, strict=False))
        rest += cost.fixed_seconds * max(0.0, rest_tokens - rooms) / capacity
    kept = (line.kept_seconds(request.speeds) + rest) / ranks * (1 - ROUNDING)
    return Placed(degrees=degrees, seconds=seconds, line=line, least_seconds=max(float(line.free.max()), kept))


def _room_tokens(request: PlanRequest, line: PlacedRings) -> list[int]:
    """Return the tokens that each ring leaves of its ranks' capacity, or [] if packs may not join rings."""
    if not request.packs_beside_rings:
        return []
    capacity, tokens = request.cluster.capacity_tokens, request.tokens
    if request.speeds is None:
        return [max(0, capacity - held_at_most(tokens[ring.sequence], ring.degree)) for ring in line.rings]
    most = (request.topology.most_held_tokens(tokens[ring.sequence], ring.first, ring.degree) for ring in line.rings)
    return [max(0, capacity - tokens) for tokens in most]


def pack(request: PlanRequest, placed: Placed) -> Schedule:
    """Put short sequences beside rings, into gaps and onto the ends."""
    lengths, seconds, line = request.lengths, placed.seconds, placed.line
    local = np.flatnonzero((placed.degrees == 1) & (lengths <= request.cluster.capacity_tokens))
    ascending = local[np.lexsort((-local, lengths[local]))]
    short = ShortSequences(ascending.tolist(), lengths[ascending].tolist(), seconds[ascending].tolist())
    launch_seconds, capacity = request.cost.fixed_seconds, request.cluster.capacity_tokens
    rooms = Rooms(line.last.tolist(), _room_tokens(request, line))
    limits = {"capacity_tokens": capacity, "launch_seconds": launch_seconds, "rooms": rooms}
    gaps, speeds, goal_seconds = line.gaps, request.speeds, request.bound_seconds * GOOD_ENOUGH
    if speeds is not None:
        gaps = replace(gaps, seconds=gaps.seconds * np.array(speeds)[gaps.ranks])  # in work, as packs
    in_gaps = fill_gaps(gaps, short, **limits)
    at_ends, makespan = level_ends(line.free.tolist(), short, **limits, goal_seconds=goal_seconds, speeds=speeds)
    return Schedule(line=line, packs=in_gaps + at_ends, makespan_seconds=makespan)


def write_schedule(schedule: Schedule, request: PlanRequest) -> list[Microbatch]:
    """Return the schedule as microbatches in one global order."""
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
        shares = request.topology.shares(request.tokens[ring.sequence], ring.first, ring.degree)
        microbatch = interval_microbatch(ring.first, ring.degree, [ring.sequence], shares)
        local = [Piece(ranks=(rank,), sequences=tuple(own)) for rank, own in sorted(beside.get(number, {}).items())]
        microbatches.append(Microbatch(pieces=(*microbatch.pieces, *local)) if local else microbatch)
    return microbatches + before.get(None, [])
