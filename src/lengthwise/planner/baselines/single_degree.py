"""A baseline: the best one degree for each step.

It stands for what careful users do without a planner: batches bucketed by length, and for each of them the mesh that
suits it, data parallel x context parallel. All sequences of a step are cut by the same degree d; the line of ranks is
N // d groups; packs hold up to d x capacity tokens. Every d that holds the longest sequence is considered, and for each
the better of two ways: sequences to the least loaded group, longest first, like lengths together; or packs filled in
data order, first fit, where attention of the long hides transfers of the short, to the least loaded group. The least
predicted makespan is kept; of equal ones the smallest d.

It has no paper. Read in its favour:
- any d is allowed, not only divisors of N; the N mod d ranks left over stay idle;
- groups are balanced by the costs of this package, not by tokens, and run free of each other;
- the degree changes from step to step at no price;
- where costs offer offload, degrees that hold the longest sequences only with it are tried, too; such a sequence is
then
  a pack of its own.
Either way alone ends up to 4 % later on the recipes of this package. What this baseline cannot do is mix degrees: one
long sequence makes every short one travel.

A degree is scheduled only if a lower bound of its makespan, a few sums, is below the best so far: exact, and a few
dozen schedules where there are hundreds of degrees. Each costs O(n p) for n sequences in p packs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.cost import JointCost
from lengthwise.planner.placing.packs import ShortSequences, level_ends
from lengthwise.planner.request import PlanRequest
from lengthwise.planner.rings import interval_microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDegree:
    """A step at one degree: packs as (group, sequences); group k is the ranks [k d, (k + 1) d)."""

    degree: int
    packs: list[tuple[int, list[int]]]
    makespan_seconds: float


def plan_single_degree(request: PlanRequest) -> list[Microbatch]:
    """Plan one step with all sequences cut by the degree that ends first."""
    cluster = request.cluster
    least = int(request.fewest_degrees.max())
    bounds = {degree: least_seconds(request, degree) for degree in range(least, cluster.ranks + 1)}
    best: SingleDegree | None = None
    for degree, bound in sorted(bounds.items(), key=lambda item: (item[1], item[0])):
        if best is not None and bound > best.makespan_seconds:
            break
        tried = schedule_at(request, degree)
        if best is None or (tried.makespan_seconds, degree) < (best.makespan_seconds, best.degree):
            best = tried
    assert best is not None, f"no degree from {least} to {cluster.ranks} was tried"
    return [interval_microbatch(group * best.degree, best.degree, pack) for group, pack in best.packs]


def least_seconds(request: PlanRequest, degree: int) -> float:
    """Bound the makespan at one degree from below: the work of all shared evenly, or the longest sequence."""
    cost, cluster = request.cost, request.cluster
    groups = cluster.ranks // degree
    launch = cost.fixed_seconds + cost.hops_seconds(degree)
    capacity = degree * cluster.capacity_tokens
    num_packs = -(-int(np.minimum(request.lengths, capacity).sum()) // capacity)  # what is longer is a pack of its own
    computing = cost.without_copies() if isinstance(cost, JointCost) else cost
    together = computing.piece_seconds(request.tokens, degree) - cost.hops_seconds(degree)
    longest = request.most_compute_seconds / degree
    return max((together + num_packs * launch) / groups, longest + launch) * (1 - 1e-12)


def schedule_at(request: PlanRequest, degree: int) -> SingleDegree:
    """Pack and balance all sequences over groups of `degree` ranks: the better of two ways."""
    lengths, cost = request.lengths, request.cost
    launch = cost.fixed_seconds + cost.hops_seconds(degree)  # hops are paid once a pack, like its launch
    ascending = np.lexsort((-np.arange(len(lengths)), lengths))
    groups, capacity = request.cluster.ranks // degree, degree * request.cluster.capacity_tokens
    room = np.minimum(room_tokens(lengths, degree), capacity)  # what is longer fills a pack by itself, and is offloaded

    seconds = cost.ring_piece_seconds(lengths, np.full_like(lengths, degree)) - cost.hops_seconds(degree)
    short = ShortSequences(ascending.tolist(), room[ascending].tolist(), seconds[ascending].tolist())
    packs, _ = level_ends([0.0] * groups, short, capacity_tokens=capacity, launch_seconds=launch)
    alike = [(pack.rank, pack.sequences) for pack in packs]
    first = SingleDegree(degree=degree, packs=alike, makespan_seconds=float(_loads(request, degree, alike).max()))
    if cost.ring_seconds == 0 or degree == 1:
        return first

    dealt = _deal_packs(request, degree, first_fit_packs(room, capacity))
    second = SingleDegree(degree=degree, packs=dealt, makespan_seconds=float(_loads(request, degree, dealt).max()))
    return min(first, second, key=lambda schedule: schedule.makespan_seconds)


def first_fit_packs(room: NDArray[np.int64], capacity_tokens: int) -> list[list[int]]:
    """Put each sequence into the first pack with room, in data order."""
    left = np.full(len(room), capacity_tokens, dtype=np.int64)
    packs: list[list[int]] = []
    for i, needed in enumerate(room.tolist()):
        pack = int(np.argmax(left[: len(packs) + 1] >= needed))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(i)
        left[pack] -= needed
    return packs


def _pack_seconds(request: PlanRequest, degree: int, pack: list[int]) -> float:
    return request.cost.fixed_seconds + request.cost.piece_seconds([request.tokens[i] for i in pack], degree)


def _deal_packs(request: PlanRequest, degree: int, packs: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Give packs to the least loaded group, longest time first."""
    loads = np.zeros(request.cluster.ranks // degree)
    dealt: list[tuple[int, list[int]]] = []
    timed = [(_pack_seconds(request, degree, pack), pack) for pack in packs]
    for seconds, pack in sorted(timed, key=lambda entry: (-entry[0], entry[1])):
        group = int(np.argmin(loads))
        loads[group] += seconds
        dealt.append((group, pack))
    return dealt


def _loads(request: PlanRequest, degree: int, packs: list[tuple[int, list[int]]]) -> NDArray[np.float64]:
    """Tell when each group is done."""
    loads = np.zeros(request.cluster.ranks // degree)
    for group, pack in packs:
        loads[group] += _pack_seconds(request, degree, pack)
    return loads


def room_tokens(lengths: NDArray[np.int64], degree: int) -> NDArray[np.int64]:
    """Tell the room that sequences take in a pack over `degree` ranks, at least their lengths.

    No position holds more than 2 ceil(s / 2d) tokens of a sequence, and one token more than its share is allowed for
    each; so packs of up to d x capacity of this room never hold too much on any position.
    """
    return np.maximum(lengths, degree * (2 * -(-lengths // (2 * degree)) - 1))
