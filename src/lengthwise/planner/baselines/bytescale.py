"""Baselines: ByteScale's balance scheduler, the best published hybrid data parallelism, and its naive form.

Sequences take the fewest ranks that hold them, hidden offload counted. Longest first, they form buckets of about equal
FLOPs, and ranks that lag the busiest by more than delta get sequences of one bucket. DP-Balance takes the first bucket
left, PP-Balance all in turn. `plan_bytescale_naive` (section 5.3, Algorithm 1) packs in data order, in rounds. O(N log
d) per ring or pack. Source: arXiv 2502.21231, section 6, Algorithm 2; docs/decisions/baselines-in-their-favour.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.planner.placement.line import earliest_interval
from lengthwise.planner.placement.short_sequences import full_packs
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import interval_microbatch

BUCKETS = (1, 2, 4, 8, 16)  # tried in this order; fewer result if one sequence exceeds a bucket
Strategy = Literal["dp-balance", "pp-balance"]
STRATEGIES: tuple[Strategy, ...] = ("dp-balance", "pp-balance")
DELTA = 0.05  # share of the ideal step time by which a target lags the busiest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOrPack:
    """One ring or pack that waits for ranks. seconds: time with launch. is_long: True for one above the capacity."""

    degree: int
    sequences: list[int]
    seconds: float
    is_long: bool = False


def plan_bytescale(request: PlanRequest) -> list[Microbatch]:
    """Plan one step with the fewest ranks per sequence, or few that split heads well, balanced by buckets."""
    flops = request.cost.compute_seconds(request.lengths)
    delta = DELTA * float(flops.sum()) / request.cluster.ranks
    strategies = STRATEGIES if request.stages == 1 else STRATEGIES[1:]
    best, least, known = list[Microbatch](), math.inf, dict[tuple[int, ...], float]()
    for degrees in degrees_to_try(request):
        for count in BUCKETS:
            divided = equal_buckets(request.lengths, flops, count)
            buckets = [_make_work(request, bucket, degrees, known) for bucket in divided]
            for strategy in strategies[: len(buckets)]:  # one bucket is the same in both
                makespan, microbatches = assign(buckets, request.cluster.ranks, delta, strategy, least)
                if makespan < least:
                    best, least = microbatches, makespan
            longest = max((work.seconds for bucket in buckets for work in bucket if work.is_long), default=0.0)
            if least <= longest:
                break  # the longest sequence at its degree: no order ends earlier
    return best


def degrees_to_try(request: PlanRequest) -> list[NDArray[np.int64]]:
    """List the degrees of all sequences to try: the fewest, or rounded up to what split heads can divide."""
    fewest, ranks, group = request.hidden_degrees, request.cluster.ranks, math.gcd(request.cost.heads, 8)
    if not request.cost.choices.splits_heads:
        return [fewest]
    multiples = np.where(fewest > 1, np.minimum(-(-fewest // group) * group, ranks), 1)
    ways = [fewest, power_of_two_degrees(fewest, ranks), multiples]
    return list({degrees.tobytes(): degrees for degrees in ways}.values())


def assign(
    buckets: Sequence[Sequence[RingOrPack]], ranks: int, delta: float, strategy: Strategy, least: float = math.inf
) -> tuple[float, list[Microbatch]]:
    """Assign work to ranks that lag by `delta` seconds; return (makespan, microbatches), or (inf, []) after `least`."""
    free = np.zeros(ranks)
    # Rank-seconds that may be spent waiting before the makespan reaches `least`; sums round.
    spare = least * ranks * (1 + 1e-9) - sum(work.degree * work.seconds for bucket in buckets for work in bucket)
    microbatches: list[Microbatch] = []
    waiting = deque([deque(run) for _, run in groupby(bucket, lambda work: work.degree)] for bucket in buckets)
    while waiting:
        bucket = waiting.popleft()
        work = _take_next(bucket, free, delta)
        first, start = earliest_interval(free, work.degree)
        if work.degree > 1:
            spare -= work.degree * start - float(free[first : first + work.degree].sum())
        if start + work.seconds >= least or spare < 0:
            return math.inf, []
        free[first : first + work.degree] = start + work.seconds
        microbatches.append(interval_microbatch(first, work.degree, work.sequences))
        if bucket and strategy == "dp-balance":
            waiting.appendleft(bucket)
        elif bucket:
            waiting.append(bucket)
    return float(free.max()), microbatches


def _take_next(bucket: list[deque[RingOrPack]], free: NDArray[np.float64], delta: float) -> RingOrPack:
    """Take the first work of a bucket that fits on neighbouring targets, else the first; runs have one degree."""
    number = 0
    if len(bucket) > 1:
        targets = _longest_run(free.max() - free > delta)
        number = next((number for number, run in enumerate(bucket) if run[0].degree <= targets), 0)
    work = bucket[number].popleft()
    if not bucket[number]:
        del bucket[number]
    return work


def equal_buckets(lengths: NDArray[np.int64], flops: NDArray[np.float64], count: int) -> list[list[int]]:
    """Divide sequences, longest first, into at most `count` buckets of about equal `flops`."""
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    sorted_flops = flops[order]
    total = float(sorted_flops.sum())
    if total == 0:
        return [order.tolist()]
    middles = np.cumsum(sorted_flops) - sorted_flops / 2
    numbers = np.minimum((middles / total * count).astype(np.int64), count - 1)
    return [part.tolist() for part in np.split(order, np.flatnonzero(np.diff(numbers)) + 1)]


def power_of_two_degrees(least: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Round degrees up to a power of two, or to all ranks if that is more."""
    rounded = np.array([1 << (int(degree) - 1).bit_length() for degree in least], dtype=np.int64)
    return np.minimum(rounded, ranks)


def _make_work(
    request: PlanRequest, bucket: list[int], degrees: NDArray[np.int64], known: dict[tuple[int, ...], float]
) -> list[RingOrPack]:
    """Make rings of the long and packs of the short sequences of a bucket, longest first; `known` keeps prices."""
    capacity, cost, tokens = request.cluster.capacity_tokens, request.cost, request.tokens
    short = [i for i in bucket if tokens[i] <= capacity][::-1]
    pieces = [(int(degrees[i]), [i]) for i in bucket if tokens[i] > capacity]
    pieces += [(1, pack) for pack in full_packs(short, [tokens[i] for i in short], capacity)]
    works: list[RingOrPack] = []
    for degree, sequences in pieces:
        key = (degree, *(tokens[i] for i in sequences))
        if key not in known:
            known[key] = cost.fixed_seconds + cost.piece_seconds(key[1:], degree)
        works.append(RingOrPack(degree=degree, sequences=sequences, seconds=known[key], is_long=key[1] > capacity))
    return works


def _longest_run(lagging: NDArray[np.bool_]) -> int:
    borders = np.flatnonzero(np.diff(np.concatenate(([False], lagging, [False]))))
    return int((borders[1::2] - borders[::2]).max(initial=0))


def plan_bytescale_naive(request: PlanRequest) -> list[Microbatch]:
    """Plan one step with the fewest ranks per sequence, dealt in order."""
    capacity = request.cluster.capacity_tokens
    tokens, degrees = request.tokens, request.hidden_degrees.tolist()
    short = sorted((i for i, length in enumerate(tokens) if length <= capacity), key=lambda i: (tokens[i], -i))
    pieces = [(degree, [i]) for i, degree in enumerate(degrees) if tokens[i] > capacity]
    pieces += [(1, pack) for pack in full_packs(short, [tokens[i] for i in short], capacity)]
    slots = deal_in_rounds([degree for degree, _ in pieces], request.cluster.ranks)
    order = sorted(range(len(pieces)), key=lambda place: slots[place])
    return [interval_microbatch(slots[place][1], *pieces[place]) for place in order]


def deal_in_rounds(degrees: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """Give each piece the next slots of the first round with room; return (round, first rank) of each."""
    taken = np.zeros(len(degrees), dtype=np.int64)
    num_rounds = 0
    slots: list[tuple[int, int]] = []
    for degree in degrees:
        number = int(np.argmax(taken[: num_rounds + 1] + degree <= ranks))
        slots.append((number, int(taken[number])))
        taken[number] += degree
        num_rounds = max(num_rounds, number + 1)
    return slots
