"""Ways to train the same batches under one capacity, each with the best of its own options; pure.

An option is one setting for all batches, as in a run. Each is planned, and simulated with the costs that all planners
get; the least sum of step seconds is taken. Planners: a fixed mesh over its degrees, `single-degree`, `bytescale` over
its capacities, `lengthwise` with the tries that a run gives it; all with and without split heads. Packed data
parallelism: `packed-dp`, in data order, and longest first by tokens. One rank alone: one document after another by
plain Hugging Face, which has no plan. Costs a few plans a way and batch.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PLANNING_SHARE, PlanOptions, plan_step
from lengthwise.simulator import simulate_plan

ONE_BY_ONE, PACKED, LENGTHWISE = "one by one", "packed DP", "lengthwise"
WAYS = (ONE_BY_ONE, PACKED, "static", "single-degree", "bytescale", LENGTHWISE)
_HEADS = ("off", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to train: a step for each batch (None: without a plan), with which options. simulated_seconds: of all.

    plan_seconds: that planning one step took on average, with the options that were chosen.
    """

    name: str
    options: str
    steps: tuple[Plan | None, ...]
    simulated_seconds: float
    plan_seconds: float = 0.0


_PlanOf = Callable[[Sequence[int]], Plan]


def choose_ways(
    names: Sequence[str], batches: Sequence[Sequence[int]], cluster: Cluster, cost: Cost, layers: int
) -> list[Way]:
    """Return each way that can run within the capacity, with its best options; the others are left out."""
    longest = max(max(lengths) for lengths in batches)
    found: list[Way] = []
    for name in names:
        if name == PACKED and longest > cluster.capacity_tokens:
            continue
        if name == ONE_BY_ONE:
            if cluster.ranks == 1:
                none = (None,) * len(batches)
                found.append(Way(name=name, options="plain Hugging Face", steps=none, simulated_seconds=0.0))
            continue
        tried = [
            _tried(name, said, plan_of, batches, cost)
            for said, plan_of in _options(name, longest, cluster, cost, layers)
        ]
        found.append(min(tried, key=lambda way: way.simulated_seconds))
    return found


def pack_step(lengths: Sequence[int], cluster: Cluster, layers: int, room_tokens: int) -> Plan:
    """Pack longest first into the fullest microbatch with room; the largest pack to the rank with fewest tokens.

    room_tokens: of a pack, at most the capacity; a longer sequence is alone.
    """
    packs: list[tuple[int, tuple[int, ...]]] = []
    for number in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        room = [pack for pack in packs if pack[0] + lengths[number] <= room_tokens]
        pack = max(room, default=(0, ()))
        if room:
            packs.remove(pack)
        packs.append((pack[0] + lengths[number], (*pack[1], number)))
    dealt = _deal(packs, cluster.ranks)
    return Plan(
        ranks=cluster.ranks,
        layers=layers,
        capacity=cluster.capacity_tokens,
        tokens=tuple(lengths),
        microbatches=tuple(
            Microbatch(pieces=(Piece(ranks=(rank,), sequences=pack),))
            for rank, mine in enumerate(dealt)
            for pack in mine
        ),
    )


def _deal(weighed: Sequence[tuple[int, tuple[int, ...]]], ranks: int) -> list[list[tuple[int, ...]]]:
    """Give each, largest first, to the rank that has least; return what each rank got."""
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for weight, sequences in sorted(weighed, key=lambda each: (-each[0], each[1])):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(sequences)
        heapq.heappush(loads, (load + weight, rank))
    return dealt


def _options(name: str, longest: int, cluster: Cluster, cost: Cost, layers: int) -> Iterator[tuple[str, _PlanOf]]:
    """Yield the options of a way, in words, and what plans a step with them."""
    one = Cluster(ranks=cluster.ranks, capacity_tokens=cluster.capacity_tokens)
    if name == PACKED:
        for part in (1, 2, 4, 8):  # smaller packs are more even
            room = one.capacity_tokens // part
            yield f"longest first, up to {room}", lambda lengths, room=room: pack_step(lengths, one, layers, room)
        ours = PlanOptions(planner="packed-dp", layers=layers)
        yield "level by seconds", lambda lengths: plan_step(lengths, one, cost, ours)
        in_order = PlanOptions(planner="static", layers=layers, context_tokens=one.capacity_tokens)
        yield "in data order", lambda lengths: plan_step(lengths, one, cost, in_order)
        return
    for heads in _HEADS:
        options = PlanOptions(planner=name, layers=layers, heads=heads, planning_share=PLANNING_SHARE)
        also = ", split heads" if heads == "auto" else ""
        if name == "static":
            for said, context in _contexts(longest, cluster):
                fixed = replace(options, context_tokens=context)
                yield said + also, lambda lengths, fixed=fixed: plan_step(lengths, cluster, cost, fixed)
        elif name == "bytescale":
            for part in (1, 2, 4):
                smaller = replace(cluster, capacity_tokens=cluster.capacity_tokens // part)
                if smaller.longest_tokens >= longest:
                    said = f"capacity {smaller.capacity_tokens}{also}"
                    yield said, lambda lengths, on=smaller, options=options: plan_step(lengths, on, cost, options)
        else:
            yield (
                f"capacity {cluster.capacity_tokens}{also}",
                lambda lengths, options=options: plan_step(lengths, cluster, cost, options),
            )


def _contexts(longest: int, cluster: Cluster) -> Iterator[tuple[str, int]]:
    """Yield the contexts that a fixed mesh may be sized for: the longest sequence, or all that a degree holds."""
    yield "sized for the longest", longest
    for degree in range(1, cluster.ranks + 1):
        if cluster.ranks % degree == 0 and degree * cluster.capacity_tokens >= longest:
            yield f"degree {degree}", degree * cluster.capacity_tokens


def _tried(name: str, said: str, plan_of: _PlanOf, batches: Sequence[Sequence[int]], cost: Cost) -> Way:
    start = time.perf_counter()
    plans = tuple(plan_of(lengths) for lengths in batches)
    took = (time.perf_counter() - start) / len(plans)
    seconds = sum(simulate_plan(plan, cost).step_seconds for plan in plans)
    return Way(name=name, options=said, steps=plans, simulated_seconds=seconds, plan_seconds=took)
