"""One rank that trains the same batches in several ways, turn by turn: what `end_to_end` times.

1. The machine is profiled by all ranks together, and rank 0 chooses and plans all ways with these costs.
2. Every way trains the first batch once, uncounted: it warms up, and its seconds correct the costs as a run's steps
   do; all ways are chosen and planned again.
3. Repeats: all ways take turns on each batch. A step is forward, backward, reduction of gradients and AdamW; its
   seconds are from a common start to the end of the last rank.

Every way has a model and an optimizer of its own from the same seed, and sees the same batches in the same order, so
their losses must stay the same.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lengthwise.attention import choose_kernel
from lengthwise.comm import Transport, World
from lengthwise.comm.exchange import broadcast_bytes
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.cost.measured import measured_cost
from lengthwise.cost.refit import RanStep, refit
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model, plain_attention
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.profiler.profile import ProfileSettings, profile
from rivals import ONE_BY_ONE, Way, choose_ways


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
    """One step of one way: of repeat 0 (uncounted) or later. waited, busy: seconds of each rank.

    work_seconds: until the last rank had done its microbatches and the step's end began.
    """

    way: str
    repeat: int
    batch: int
    seconds: float
    work_seconds: float
    loss: float
    waited: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came out: the ways as they were chosen, and every step."""

    ways: tuple[Way, ...]
    steps: tuple[TimedStep, ...]


def train_in_turns(transport: Transport, setting: Setting) -> Trained:
    """Do all of it, as one rank; what is returned is whole on rank 0."""
    torch.set_num_threads(1)
    rank, ends = _Rank(transport, setting), time.perf_counter() + setting.seconds
    cost = rank.measured()
    ways = rank.choose(cost)
    steps = rank.round(ways, 0)
    cost = refit(cost, [rank.ran(ways, each) for each in steps if each.way != ONE_BY_ONE])
    ways = rank.choose(cost)
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
                        work_seconds=float(rows[:, 4].max()),
                        loss=float(rows[:, 1].sum()) / batch.loss_tokens,
                        waited=tuple(rows[:, 2].tolist()),
                        busy=tuple(rows[:, 3].tolist()),
                    )
                )
                if self._transport.rank == 0:
                    print(f"  round {repeat}, batch {number}: {way.name} {steps[-1].seconds:.2f} s", flush=True)
        return steps

    def latest(self, seconds: float) -> float:
        """Return the most that any rank says, on which all agree."""
        return float(_shared(self._transport, [seconds]).max())

    def ran(self, ways: Sequence[Way], step: TimedStep) -> RanStep:
        (plan,) = (way.steps[step.batch] for way in ways if way.name == step.way)
        assert isinstance(plan, Plan), f"{step.way} has plans"
        return RanStep(plan=plan, busy_seconds=step.busy, step_seconds=step.seconds)


class _Trainee:
    """A model and its optimizer, trained in one way."""

    def __init__(self, transport: Transport, source: ModelSource, *, plain: bool) -> None:
        self._transport = transport
        self._model = build_model(source, seed=0, attention=plain_attention(source) if plain else ATTENTION_NAME)
        self._parameters = FlatParameters(self._model, transport, dtype=torch.float32)
        self._config = OptimizerConfig()
        self._optimizer = ShardedOptimizer(self._parameters, self._config, transport)
        self._kernel = choose_kernel(torch.device("cpu"))

    def step(self, plan: Plan | None, batch: StepBatch) -> list[float]:
        """Train one step; return this rank's (seconds, summed loss, waited, busy, seconds before the step's end)."""
        self._transport.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        if plan is None:
            loss_sum, waited = self._one_by_one(batch), 0.0
            busy = time.perf_counter() - start
        else:
            result = run_plan(self._model, plan, batch, self._transport, self._kernel, name="benchmark")
            loss_sum, waited, busy = result.loss_sum, result.ring_wait_seconds, result.busy_seconds
        work_seconds = time.perf_counter() - start
        self._optimizer.update(self._config.lr, self._optimizer.reduce())
        return [time.perf_counter() - start, loss_sum, waited, busy, work_seconds]

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
