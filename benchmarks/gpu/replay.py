"""Whole plans of many ranks on one device: each rank's microbatches run one rank after the other, and are put together.

1. Costs are fitted on this device; links are those of the hardware description.
2. A rank's program runs with transfers that return at once: what arrives is a copy of what it sends, of the right size.
3. A microbatch's seconds are those between the starts of two on the device.
4. They take the places that the plan's order gives them: one starts when all its ranks are free, and ends after the
   slowest of them and what its transfers take beyond computing, which is modelled.

So the makespan has the device's own arithmetic, and the simulator's error can be read beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gpu.loops import OurLoop
from gpu.rows import Records, finish
from gpu.setting import Sizes, hardware_here, model_source, plan_for
from lengthwise.comm import Done, Pending, SoloTransport, World
from lengthwise.comm.transport import Message
from lengthwise.config import OptimizerConfig
from lengthwise.core.measurements import Measurements
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, shape_from_config
from lengthwise.cost.fit import with_curves, with_terms
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import StepBatch, random_batch
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
from lengthwise.simulator import simulate_plan
from lengthwise.simulator.rounds import microbatch_clocks

Seconds = Mapping[tuple[int, int], float]
"""Of a rank in a microbatch, by (rank, index of the microbatch)."""


def replay(sizes: Sizes, records: Records) -> None:
    """Write a row `replay` for each number of ranks and planner, of the same batches."""
    device = sizes.where
    loop = OurLoop(sizes.replay_model, device, sizes.dtype)
    config: Any = loop.model.config
    measured = _measure(sizes, loop)
    base = base_cost(shape_from_config(config.to_dict()), measured.hardware, precision=measured.precision)
    fit = measured.fit
    cost = with_terms(with_curves(base, fit.block_efficiency, fit.ring_efficiency), fit.known)
    records.keep("replay-measurements.json", measured.to_json())
    for line in loop.said:
        records.add("note", said=line)
    for ranks, planners in sizes.replay_plans.items():
        cluster = Cluster(ranks=ranks, capacity_tokens=sizes.replay_capacity_tokens)
        lengths = sizes.replay_batch(ranks).lengths()
        batch = random_batch(lengths, vocab=config.vocab_size)
        for planner in planners:
            plan = plan_for(lengths, cost, cluster, planner=planner, layers=config.num_hidden_layers)
            seconds = replayed_seconds(loop, plan, batch)
            makespan, simulated = makespan_of(plan, seconds, cost), simulate_plan(plan, cost).work_end_seconds.max()
            records.add(
                "replay", ranks=ranks, planner=planner, tokens=sum(lengths), longest_tokens=max(lengths),
                replayed_seconds=makespan, simulated_seconds=float(simulated),
                simulation_error=float(simulated) / makespan - 1,
                computing_share=sum(seconds.values()) / (makespan * ranks),
                plan=records.keep(f"replay-{ranks}-{planner}.json", plan.to_json()),
            )  # fmt: skip


def _measure(sizes: Sizes, loop: OurLoop) -> Measurements:
    """Profile the model of a loop on one rank, which changes no weight."""
    world = World(rank=0, world_size=1, gpus=int(loop.device.type == "cuda"))
    settings = ProfileSettings(
        seconds=sizes.replay_profile_seconds, longest_tokens=sizes.replay_capacity_tokens, precision=sizes.precision,
        clock="wall", hardware=hardware_here(loop.device), computing=loop.computing,
    )  # fmt: skip
    trained = loop.model, loop.parameters, sliced_optimizer(OptimizerConfig(), loop.model, loop.parameters, 0)
    return profile(model_source(sizes.replay_model), world, loop.transport, settings, trained=trained)


class ReplayTransport(SoloTransport):
    """One rank of many without the others; notes when its microbatches begin."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._device, self._sent, self._marks = device, dict[torch.dtype, Tensor](), list[Any]()
        super().__init__()
        self.rank, self.world_size = rank, world_size

    @property
    def phase(self) -> str:
        """Where in the step this rank is, in words."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if phase.endswith(" forward"):
            self.mark()

    def mark(self) -> None:
        """Note the time on the device."""
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between two marks, of all."""
        finish(self._device)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]
        return [after - before for before, after in pairwise(self._marks)]

    def connect(self, peers: Sequence[int]) -> None:
        """There is no one to meet."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Fill what would arrive with what is sent, or was sent last, of the same type."""
        self._sent.update({tensor.dtype: tensor for tensor, _ in sends})
        for into, _ in receives:
            _fill(into, self._sent.get(into.dtype))
        return Done()


def _fill(into: Tensor, source: Tensor | None) -> None:
    """Copy `source` over and over into `into`; values of any kind where there is none."""
    flat = into.view(-1)
    if source is None or not source.numel():
        flat.normal_()
        return
    values = source.detach().reshape(-1)
    for start in range(0, len(flat), len(values)):
        part = flat[start : start + len(values)]
        part.copy_(values[: len(part)])


def replayed_seconds(loop: OurLoop, plan: Plan, batch: StepBatch) -> Seconds:
    """Run the microbatches of all ranks, one rank after the other; the first rank twice, to warm up."""
    found: dict[tuple[int, int], float] = {}
    for rank in (0, *range(plan.ranks)):
        transport = ReplayTransport(rank, plan.ranks, loop.device)
        mine = [index for index, microbatch in enumerate(plan.microbatches) if rank in microbatch.ranks]
        if not mine:
            continue
        finish(loop.device)
        loop.work(plan, batch, transport=transport)
        transport.mark()
        seconds = transport.seconds()
        assert len(seconds) == len(mine), f"{len(seconds)} microbatches ran on rank {rank}, the plan has {len(mine)}"
        found.update({(rank, index): each for index, each in zip(mine, seconds, strict=True)})
        loop.parameters.clear_gradients()
    return found


def makespan_of(plan: Plan, seconds: Seconds, cost: Cost) -> float:
    """Put measured microbatches in the plan's order, with what transfers take beyond computing by `cost`."""
    free = [0.0] * plan.ranks
    for index, microbatch in enumerate(plan.microbatches):
        clocks = microbatch_clocks(microbatch, plan.tokens, cost)
        totals = dict(zip(clocks.ranks, clocks.total.tolist(), strict=True))
        computes = dict(zip(clocks.ranks, clocks.compute.tolist(), strict=True))
        for together in rings_of(microbatch):
            exposed = max(totals[rank] for rank in together) - max(computes[rank] for rank in together)
            slowest = max(seconds[rank, index] for rank in together)
            end = max(free[rank] for rank in together) + slowest + (max(0.0, exposed) if len(together) > 1 else 0.0)
            for rank in together:
                free[rank] = end
    return max(free)


def rings_of(microbatch: Microbatch) -> list[set[int]]:
    """Return the ranks that wait for each other: those of a piece, and of pieces that share one."""
    groups: list[set[int]] = []
    for piece in microbatch.pieces:
        joined = set(piece.ranks).union(*(group for group in groups if group & set(piece.ranks)))
        groups = [group for group in groups if not group & joined] + [joined]
    return groups
