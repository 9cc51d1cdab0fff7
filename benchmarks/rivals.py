"""Ways to train the same batches under one capacity, each with the best of its own options, and training in turns.

An option is one setting for all batches, as in a run. Each is planned, and simulated with the costs that all planners
get; the least sum of step seconds is taken. Planners: a fixed mesh over its degrees, `single-degree`, `bytescale` over
its capacities, `lengthwise` with the tries that a run gives it; all with and without split heads. Packed data
parallelism: `packed-dp`, in data order, and longest first by tokens. One rank alone: one document after another by
plain Hugging Face, which has no plan. Costs a few plans a way and batch.

1. The machine is profiled by all ranks together, and rank 0 chooses and plans all ways with these costs.
2. Every way trains the first batch once, uncounted, to warm up.
3. Repeats: all ways take turns on each batch. A step is forward, backward, reduction of gradients and AdamW; its
   seconds are from a common start to the end of the last rank.

Every way has a model and an optimizer of its own from the same seed, and sees the same batches in the same order, so
their losses must stay the same.
"""

from __future__ import annotations

import heapq
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from testing.laid import whole_parameters

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, Transport, World
from lengthwise.comm.exchange import broadcast_bytes
from lengthwise.config import FRESH_RATE, OptimizerConfig
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.cost.measured import measured_cost
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import ModelSource, build_model, plain_attention
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.planner import PLANNING_SHARE, PlanOptions, plan_step
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all ranks train, and how often: no repeat begins that would end after `seconds`."""

    source: ModelSource
    batches: tuple[StepBatch, ...]
    cluster: Cluster
    ranks_per_node: int
    ways: tuple[str, ...]
    repeats: int
    seconds: float
    profile_seconds: float
    profile_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of one way: of repeat 0 (uncounted) or later. waited: seconds of each rank.

    work_seconds: until the last rank had done its microbatches and the step's end began.
    """

    way: str
    repeat: int
    batch: int
    seconds: float
    work_seconds: float
    loss: float
    waited: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came out: the ways as they were chosen, and every step."""

    ways: tuple[Way, ...]
    steps: tuple[TimedStep, ...]


def train_in_turns(transport: Transport, setting: Setting) -> Trained:
    """Do all of it, as one rank; what is returned is whole on rank 0."""
    torch.set_num_threads(1)
    rank, ends = _Rank(transport, setting), time.perf_counter() + setting.seconds
    ways = rank.choose(rank.measured())
    steps = rank.round(ways, 0)
    for repeat in range(1, setting.repeats + 1):
        start = time.perf_counter()
        steps += rank.round(ways, repeat)
        if rank.latest(2 * time.perf_counter() - start - ends) > 0:  # the next would end too late on some rank
            break
    return Trained(ways=tuple(ways), steps=tuple(steps))


class _Rank:
    def __init__(self, transport: Transport, setting: Setting) -> None:
        self._transport, self._setting = transport, setting
        self._trainees = {name: _Trainee(transport, setting.source, plain=name == ONE_BY_ONE) for name in setting.ways}

    def measured(self) -> Cost:
        setting, rank = self._setting, self._transport.rank
        world = World(
            rank=rank,
            world_size=self._transport.world_size,
            local_rank=rank % setting.ranks_per_node,
            local_size=setting.ranks_per_node,
        )
        settings = ProfileSettings(
            seconds=setting.profile_seconds,
            longest_tokens=setting.profile_tokens,
            precision="fp32",
            clock="wall",
            hardware="cpu",
        )
        return measured_cost(profile(setting.source, world, self._transport, settings))

    def choose(self, cost: Cost) -> list[Way]:
        """Let rank 0 choose the ways, the same for all."""
        setting, data = self._setting, None
        if self._transport.rank == 0:
            lengths = [batch.lengths for batch in setting.batches]
            layers = setting.source.config.num_hidden_layers
            data = pickle.dumps(choose_ways(setting.ways, lengths, setting.cluster, cost, layers))
        return pickle.loads(broadcast_bytes(self._transport, data))  # what rank 0 of this program wrote

    def round(self, ways: Sequence[Way], repeat: int) -> list[TimedStep]:
        """Train every batch in every way once, in round 0 the first; another way goes first each time."""
        steps = []
        for number, batch in enumerate(self._setting.batches[: None if repeat else 1]):
            first = (repeat + number) % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                took = self._trainees[way.name].step(way.steps[number], batch)
                rows = _shared(self._transport, took)
                steps.append(
                    TimedStep(
                        way=way.name,
                        repeat=repeat,
                        batch=number,
                        seconds=float(rows[:, 0].max()),
                        work_seconds=float(rows[:, 3].max()),
                        loss=float(rows[:, 1].sum()) / batch.loss_tokens,
                        waited=tuple(rows[:, 2].tolist()),
                    )
                )
                if self._transport.rank == 0:
                    print(f"  round {repeat}, batch {number}: {way.name} {steps[-1].seconds:.2f} s", flush=True)
        return steps

    def latest(self, seconds: float) -> float:
        """Return the most that any rank says, on which all agree."""
        return float(_shared(self._transport, [seconds]).max())


class _Trainee:
    """A model and its optimizer, trained in one way."""

    def __init__(self, transport: Transport, source: ModelSource, *, plain: bool) -> None:
        self._transport = transport
        self._model = build_model(source, seed=0, attention=plain_attention(source) if plain else ATTENTION_NAME)
        self._parameters = whole_parameters(self._model, transport, dtype=torch.float32)
        self._optimizer = sliced_optimizer(
            OptimizerConfig(lr=FRESH_RATE), self._model, self._parameters, transport.rank
        )
        self._kernel = choose_kernel(torch.device("cpu"))

    def step(self, plan: Plan | None, batch: StepBatch) -> list[float]:
        """Train one step; return this rank's (seconds, summed loss, waited, seconds before the step's end)."""
        self._transport.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        if plan is None:
            loss_sum, waited = self._one_by_one(batch), 0.0
        else:
            context = StepContext(self._model, Mesh(self._transport, 1), self._kernel, name="benchmark")
            result = run_part(plan, batch, context)
            loss_sum, waited = result.loss_sum, result.ring_wait_seconds
        work_seconds = time.perf_counter() - start
        self._optimizer.end_step(FRESH_RATE, self._transport)
        return [time.perf_counter() - start, loss_sum, waited, work_seconds]

    def _one_by_one(self, batch: StepBatch) -> float:
        """Run the loop of a careful user of plain Hugging Face: one document a forward, no padding."""
        total = 0.0
        for number in range(len(batch.ids)):
            ids = batch.whole(number)[0][None]
            loss = self._model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=batch.loss_tokens).loss
            loss.backward()
            total += float(loss.detach()) * batch.loss_tokens
        return total


def _shared(transport: Transport, numbers: Sequence[float]) -> np.ndarray:
    """Return the numbers of all ranks, (ranks, numbers)."""
    rows = torch.empty(transport.world_size * len(numbers), dtype=torch.float64)
    transport.all_gather(rows, torch.tensor(numbers, dtype=torch.float64))
    return rows.view(transport.world_size, -1).numpy()
