"""Baselines: the best single degree of each step, as careful users choose by hand, and packed data parallelism.

Every degree d that holds the longest sequence cuts all sequences; N // d groups take them longest first, or as packs in
data order. The least makespan wins, among equal ones the smallest d; bounds skip the rest. `packed-dp` is d = 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.core.held import held_at_most, rounding_tokens
from lengthwise.core.plan import Microbatch
from lengthwise.planner.placement.level_ends import level_ends
from lengthwise.planner.placement.short_sequences import ShortSequences
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import interval_microbatch

PACKED_DP = "packed-dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDegree:
    """A step at one degree. packs: (group, sequences) of each pack; group k has the ranks [k d, (k + 1) d)."""

    degree: int
    packs: list[tuple[int, list[int]]]
    makespan_seconds: float


def plan_single_degree(request: PlanRequest) -> list[Microbatch]:
    """Plan one step with all sequences cut by the degree that ends first."""
    degrees = _degrees(request)
    best: SingleDegree | None = None
    for bound, degree in sorted((least_seconds(request, degree), degree) for degree in degrees):
        if best is not None and bound > best.makespan_seconds:
            break
        tried = schedule_at(request, degree)
        if best is None or (tried.makespan_seconds, degree) < (best.makespan_seconds, best.degree):
            best = tried
    assert best is not None, f"no degree of {degrees} was tried"
    return [interval_microbatch(group * best.degree, best.degree, pack) for group, pack in best.packs]


def plan_packed_dp(request: PlanRequest) -> list[Microbatch]:
    """Plan one step of whole sequences; one above the capacity has a pack of its own, for offload to hold."""
    return [interval_microbatch(rank, 1, pack) for rank, pack in schedule_at(request, 1).packs]


def refuse_cut(tokens: Sequence[int], held_tokens: int) -> None:
    """Raise PlanError for sequences that one rank does not hold, with the capacity that would hold them."""
    longest, more = max(tokens), sum(length > held_tokens for length in tokens) - 1
    if more >= 0:
        raise PlanError(
            f"sequence {tokens.index(longest)}",
            expected=f"at most {held_tokens} tokens, which one rank holds: planner {PACKED_DP} cuts no sequence",
            got=f"{longest} tokens" + (f", and {more} more that are too long" if more else ""),
            remedy=f"Raise {{capacity_tokens}} to {longest} (more pipeline stages or {{recompute}} "
            "make room), or take a planner that cuts sequences, such as lengthwise.",
        )


def least_seconds(request: PlanRequest, degree: int) -> float:
    """Return a lower bound of the makespan at one degree: all work shared evenly, or the longest sequence."""
    cost, cluster = request.cost, request.cluster
    whole = cost.without_copies()
    together_seconds = whole.piece_seconds(request.lengths, degree) - whole.hops_seconds(degree)
    groups = cluster.ranks // degree
    launch = cost.fixed_seconds + cost.hops_seconds(degree)
    capacity = degree * cluster.capacity_tokens
    num_packs = -(-int(np.minimum(request.lengths, capacity).sum()) // capacity)  # a longer sequence is a pack
    longest = request.most_compute_seconds / degree
    return max((together_seconds + num_packs * launch) / groups, longest + launch) * (1 - 1e-12)


def _degrees(request: PlanRequest) -> range:
    """Return the degrees that hold the longest sequence; if costs allow offload, those that need it."""
    least, ranks = int(request.fewest_degrees.max()), request.cluster.ranks
    without = -(-max(request.tokens) // request.cluster.capacity_tokens)
    return range(least, without if least < without <= ranks else ranks + 1)


def schedule_at(request: PlanRequest, degree: int) -> SingleDegree:
    """Pack and balance all sequences over groups of `degree` ranks; the better of two ways."""
    lengths, cost = request.lengths, request.cost
    launch = cost.fixed_seconds + cost.hops_seconds(degree)  # hops are paid once per pack, like its launch
    ascending = np.lexsort((-np.arange(len(lengths)), lengths))
    groups, capacity = request.cluster.ranks // degree, degree * request.cluster.capacity_tokens
    room = np.minimum(room_tokens(lengths, degree), capacity)  # a longer sequence fills a pack, and is offloaded

    seconds = cost.ring_piece_seconds(lengths, np.full_like(lengths, degree)) - cost.hops_seconds(degree)
    short = ShortSequences(ascending.tolist(), room[ascending].tolist(), seconds[ascending].tolist())
    packs, _ = level_ends([0.0] * groups, short, capacity_tokens=capacity, launch_seconds=launch)
    ways = [[(pack.rank, pack.sequences) for pack in packs]]
    if degree == 1 or cost.ring_bytes:
        ways.append(_deal_packs(request, degree, first_fit_packs(room, capacity)))
    ends = [_makespan(request, degree, way) for way in ways]
    return SingleDegree(degree=degree, packs=ways[ends.index(min(ends))], makespan_seconds=min(ends))


def first_fit_packs(room: NDArray[np.int64], capacity_tokens: int) -> list[list[int]]:
    """Put each sequence into the first pack with room, in data order; a tree keeps the most room of pairs."""
    most_packs = 2 * (int(room.sum()) // capacity_tokens) + 2  # two neighbouring packs hold more than one capacity
    leaves = 1 << (most_packs - 1).bit_length()
    most = [capacity_tokens] * (2 * leaves)  # entry k: most room in 2k and 2k + 1; entries from `leaves` on: of a pack
    packs: list[list[int]] = []
    for i, needed in enumerate(room.tolist()):
        node = 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= needed else 2 * node + 1
        if node - leaves == len(packs):
            packs.append([])
        packs[node - leaves].append(i)
        most[node] -= needed
        while node > 1 and most[node // 2] != (left := max(most[node], most[node ^ 1])):
            node //= 2
            most[node] = left
    return packs


def _pack_seconds(request: PlanRequest, degree: int, pack: list[int]) -> float:
    return request.cost.fixed_seconds + request.cost.piece_seconds([request.tokens[i] for i in pack], degree)


def _deal_packs(request: PlanRequest, degree: int, packs: list[list[int]]) -> list[tuple[int, list[int]]]:
    groups = [(0.0, group) for group in range(request.cluster.ranks // degree)]
    dealt: list[tuple[int, list[int]]] = []
    timed = [(_pack_seconds(request, degree, pack), pack) for pack in packs]
    for seconds, pack in sorted(timed, key=lambda entry: (-entry[0], entry[1])):
        load, group = groups[0]
        heapq.heapreplace(groups, (load + seconds, group))
        dealt.append((group, pack))
    return dealt


def _makespan(request: PlanRequest, degree: int, packs: list[tuple[int, list[int]]]) -> float:
    loads = np.zeros(request.cluster.ranks // degree)
    for group, pack in packs:
        loads[group] += _pack_seconds(request, degree, pack)
    return float(loads.max())


def room_tokens(lengths: NDArray[np.int64], degree: int) -> NDArray[np.int64]:
    """Return the room that sequences take in a pack over `degree` ranks, at least their lengths.

    Packs of up to d x capacity of this room never exceed the capacity of a position, rounding allowed.
    """
    return np.maximum(lengths, degree * (held_at_most(lengths, degree) - rounding_tokens(1, degree)))
