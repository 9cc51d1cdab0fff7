"""A baseline: power-of-two degrees in balanced sub-batches, the rule of Megatron-Core's hybrid context parallel.

Sequences take the next power of two of s / C ranks, and form buckets of about equal s^2 / degree. A sub-batch takes the
heads of buckets while ranks are not level; then its busiest group gives back and idle ranks double the narrowest.
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
DELTA = 0.05  # of the busiest rank's work: ranks within it are level


@dataclass(slots=True, kw_only=True)
class Gang:
    """Ranks that share a sub-batch's sequences of one degree; `work` in squared tokens a rank."""

    degree: int
    sequences: list[int] = field(default_factory=list)
    work: float = 0.0


def plan_power_of_two(request: PlanRequest) -> list[Microbatch]:
    """Plan one step by next powers of two, sub-batch by sub-batch."""
    lengths, ranks = request.lengths, request.cluster.ranks
    degrees = power_of_two_degrees(request.hidden_degrees, ranks)
    work = np.square(lengths.astype(np.float64)) / degrees
    left = np.lexsort((np.arange(len(lengths)), -lengths)).tolist()
    microbatches: list[Microbatch] = []
    while left:
        gangs = next_sub_batch(left, lengths, degrees, work, ranks)
        taken = {sequence for gang in gangs for sequence in gang.sequences}
        left = [sequence for sequence in left if sequence not in taken]
        microbatches += write_sub_batch(gangs, pack_gangs(request, gangs), is_first=not microbatches)
    return microbatches


def next_sub_batch(sequences: Sequence[int], lengths: Whole, degrees: Whole, work: Floats, ranks: int) -> list[Gang]:
    """Form one sub-batch from sequences given longest first; its gangs take the ranks in this order, from rank 0."""
    some = np.array(sequences, dtype=np.int64)
    count = len(np.unique(degrees[some]))
    buckets = [deque(some[bucket].tolist()) for bucket in equal_buckets(lengths[some], work[some], count)]
    gangs = _fill_gangs(buckets, degrees, work, ranks)
    empty = ranks - sum(gang.degree for gang in gangs)
    if empty == 0:
        _trim(gangs, work)
    _widen(gangs, empty, ranks)
    return gangs


def _fill_gangs(buckets: list[deque[int]], degrees: Whole, work: Floats, ranks: int) -> list[Gang]:
    """Place the heads of buckets until ranks are level or nothing fits."""
    gangs: list[Gang] = []
    loads: dict[int, list[tuple[float, int]]] = {}  # by degree: (work, gang), least first
    free, most, widest = ranks, 0.0, 0
    while True:
        bucket = next((b for b in buckets if b and (degrees[b[0]] <= free or int(degrees[b[0]]) in loads)), None)
        if bucket is None:
            return gangs
        sequence = bucket.popleft()
        degree = int(degrees[sequence])
        widest = widest or degree
        if degree <= free:
            free -= degree
            number = len(gangs)
            gangs.append(Gang(degree=degree))
        else:
            number = heapq.heappop(loads[degree])[1]
        gang = gangs[number]
        gang.sequences.append(sequence)
        gang.work += float(work[sequence])
        most = max(most, gang.work)
        heapq.heappush(loads.setdefault(degree, []), (gang.work, number))
        if degree < widest:
            widest = ranks + 1  # from now on the ranks are looked at after every sequence
        level = free == 0 and most - min(heap[0][0] for heap in loads.values()) <= DELTA * most
        if widest > ranks and level:
            return gangs


def _trim(gangs: list[Gang], work: Floats) -> None:
    """Give back the last sequence of the busiest group while that levels ranks."""
    while True:
        busiest = max(gangs, key=lambda gang: gang.work)
        least = min(gang.work for gang in gangs)
        slack = busiest.work - least
        if slack <= DELTA * busiest.work or len(busiest.sequences) < 2:
            return
        trimmed = busiest.work - float(work[busiest.sequences[-1]])
        others = max((gang.work for gang in gangs if gang is not busiest), default=trimmed)
        if max(trimmed, others) - min(trimmed, least) >= slack:
            return
        busiest.sequences.pop()
        busiest.work = trimmed


def _widen(gangs: list[Gang], empty: int, ranks: int) -> None:
    """Double the first of the narrowest groups, or give it all ranks, while enough ranks are idle."""
    while empty > 0:
        gang = min(gangs, key=lambda gang: gang.degree)
        wider = min(2 * gang.degree, ranks)
        if wider - gang.degree > empty:
            return
        empty -= wider - gang.degree
        gang.degree = wider


def pack_gangs(request: PlanRequest, gangs: Sequence[Gang]) -> list[list[list[int]]]:
    """Pack what each gang holds, in its order, first fit up to the capacity; return the packs of each gang."""
    packs = []
    for gang in gangs:
        room = room_tokens(request.lengths[gang.sequences], gang.degree)
        capacity = gang.degree * request.cluster.capacity_tokens
        filled = first_fit_packs(np.minimum(room, capacity), capacity)  # what is longer fills a pack by itself
        packs.append([[gang.sequences[i] for i in pack] for pack in filled])
    return packs


def write_sub_batch(gangs: Sequence[Gang], packs: Sequence[list[list[int]]], *, is_first: bool) -> list[Microbatch]:
    """Write the packs of each gang; the first packs of all gangs are one microbatch, where all ranks meet."""
    heads: list[Piece] = []
    rest: list[Microbatch] = []
    first = 0
    for gang, of_gang in zip(gangs, packs, strict=True):
        ranks = ring_order(first, gang.degree)
        first += gang.degree
        pieces = [Piece(ranks=ranks, sequences=tuple(pack)) for pack in of_gang]
        heads.append(pieces[0])
        rest += [Microbatch(pieces=(piece,)) for piece in pieces[1:]]
    meeting = [Microbatch(pieces=(piece,)) for piece in heads] if is_first else [Microbatch(pieces=tuple(heads))]
    return meeting + rest
