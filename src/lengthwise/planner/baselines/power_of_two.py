"""A baseline: power-of-two degrees in balanced sub-batches, as in Megatron-Core's hybrid context parallelism.

Sequences take the next power of two of s / C ranks, and form buckets of about equal s^2 / degree. A sub-batch takes the
heads of buckets while ranks are not level; then its busiest group gives back, and idle ranks double the narrowest.
Source: `BalancedCPScheduler` of Megatron-Core 0.16; differences: docs/decisions/baselines-in-their-favour.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.planner.baselines.bytescale import equal_buckets, power_of_two_degrees
from lengthwise.planner.baselines.single_degree import first_fit_packs, room_tokens
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import ring_order

Whole, Floats = NDArray[np.int64], NDArray[np.float64]
DELTA = 0.05  # share of the busiest rank's work within which ranks count as level


@dataclass(slots=True, kw_only=True)
class Group:
    """Ranks that share a sub-batch's sequences of one degree. work: squared tokens per rank."""

    degree: int
    sequences: list[int] = field(default_factory=list)
    work: float = 0.0


def plan_power_of_two(request: PlanRequest) -> list[Microbatch]:
    """Plan one step with next powers of two, sub-batch by sub-batch."""
    lengths, ranks = request.lengths, request.cluster.ranks
    degrees = power_of_two_degrees(request.hidden_degrees, ranks)
    work = np.square(lengths.astype(np.float64)) / degrees
    left = np.lexsort((np.arange(len(lengths)), -lengths)).tolist()
    microbatches: list[Microbatch] = []
    while left:
        groups = next_sub_batch(left, lengths, degrees, work, ranks)
        taken = {sequence for group in groups for sequence in group.sequences}
        left = [sequence for sequence in left if sequence not in taken]
        microbatches += write_sub_batch(request, groups, is_first=not microbatches)
    return microbatches


def next_sub_batch(sequences: Sequence[int], lengths: Whole, degrees: Whole, work: Floats, ranks: int) -> list[Group]:
    """Form one sub-batch of sequences given longest first; its groups take the ranks in order, from rank 0."""
    some = np.array(sequences, dtype=np.int64)
    count = len(np.unique(degrees[some]))
    buckets = [deque(some[bucket].tolist()) for bucket in equal_buckets(lengths[some], work[some], count)]
    groups = _fill_groups(buckets, degrees, work, ranks)
    empty = ranks - sum(group.degree for group in groups)
    if empty == 0:
        _trim(groups, work)
    _widen(groups, empty, ranks)
    return groups


def _fill_groups(buckets: list[deque[int]], degrees: Whole, work: Floats, ranks: int) -> list[Group]:
    """Place the heads of buckets until ranks are level or nothing fits."""
    groups: list[Group] = []
    loads: dict[int, list[tuple[float, int]]] = {}  # by degree: (work, group), least first
    free, most, widest = ranks, 0.0, 0
    while True:
        bucket = next((b for b in buckets if b and (degrees[b[0]] <= free or int(degrees[b[0]]) in loads)), None)
        if bucket is None:
            return groups
        sequence = bucket.popleft()
        degree = int(degrees[sequence])
        widest = widest or degree
        if degree <= free:
            free -= degree
            number = len(groups)
            groups.append(Group(degree=degree))
        else:
            number = heapq.heappop(loads[degree])[1]
        group = groups[number]
        group.sequences.append(sequence)
        group.work += float(work[sequence])
        most = max(most, group.work)
        heapq.heappush(loads.setdefault(degree, []), (group.work, number))
        if degree < widest:
            widest = ranks + 1  # from now on every sequence may end the sub-batch
        level = free == 0 and most - min(heap[0][0] for heap in loads.values()) <= DELTA * most
        if widest > ranks and level:
            return groups


def _trim(groups: list[Group], work: Floats) -> None:
    """Give back the last sequence of the busiest group while that levels ranks."""
    while True:
        busiest = max(groups, key=lambda group: group.work)
        least = min(group.work for group in groups)
        slack = busiest.work - least
        if slack <= DELTA * busiest.work or len(busiest.sequences) < 2:
            return
        trimmed = busiest.work - float(work[busiest.sequences[-1]])
        others = max((group.work for group in groups if group is not busiest), default=trimmed)
        if max(trimmed, others) - min(trimmed, least) >= slack:
            return
        busiest.sequences.pop()
        busiest.work = trimmed


def _widen(groups: list[Group], empty: int, ranks: int) -> None:
    """Double the first of the narrowest groups, or give it all ranks, while enough ranks are idle."""
    while empty > 0:
        group = min(groups, key=lambda group: group.degree)
        wider = min(2 * group.degree, ranks)
        if wider - group.degree > empty:
            return
        empty -= wider - group.degree
        group.degree = wider


def write_sub_batch(request: PlanRequest, groups: Sequence[Group], *, is_first: bool) -> list[Microbatch]:
    """Return the packs of each group; after the first sub-batch, the groups' first packs share a microbatch."""
    heads: list[Piece] = []
    rest: list[Microbatch] = []
    first = 0
    for group in groups:
        ranks = ring_order(first, group.degree)
        first += group.degree
        pieces = [Piece(ranks=ranks, sequences=tuple(pack)) for pack in _packs(request, group)]
        heads.append(pieces[0])
        rest += [Microbatch(pieces=(piece,)) for piece in pieces[1:]]
    meeting = [Microbatch(pieces=(piece,)) for piece in heads] if is_first else [Microbatch(pieces=tuple(heads))]
    return meeting + rest


def _packs(request: PlanRequest, group: Group) -> list[list[int]]:
    """Pack a group's sequences in order, first fit up to the capacity."""
    room = room_tokens(request.lengths[group.sequences], group.degree)
    capacity = group.degree * request.cluster.capacity_tokens
    filled = first_fit_packs(np.minimum(room, capacity), capacity)  # a longer sequence fills a pack
    return [[group.sequences[i] for i in pack] for pack in filled]
