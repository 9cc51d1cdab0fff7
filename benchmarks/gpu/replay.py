"""Whole plans of many ranks on one device: each rank's microbatches run one rank after the other, and are put together.

1. Costs are fitted on this device; links are those of the hardware description.
2. A rank's program runs with transfers that return at once: what arrives is a copy of what it sends, of the right size.
3. A microbatch's seconds are those between the starts of two on the device.
4. They take the places that the plan's order gives them: one starts when all its ranks are free, and ends after the
   slowest of them and what its transfers take beyond computing, which is modelled.

So the makespan has the device's own arithmetic, and the simulator's error can be read beside it. Plans in waves, as of
sharded parameters, run in lock-step: a wave ends for all ranks after the slowest of them, and what gathers and sums
take beyond its passes, which is modelled, too. Not included: what a transfer's kernels take from attention beside them.
"""

from __future__ import annotations

import re
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
from lengthwise.cost import Cost, named_hardware, shape_from_config
from lengthwise.cost.fit import with_curves, with_terms
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import StepBatch, random_batch
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
from lengthwise.simulator import LAYOUTS, OURS, Scenario, compare, simulate_plan
from lengthwise.simulator.rivals import BY_WORK, ONE_RING, PACKED
from lengthwise.simulator.rounds import microbatch_clocks

WAVES = (PACKED, ONE_RING, BY_WORK, OURS)  # the rows of `lengthwise simulate` that are replayed by waves
Seconds = Mapping[tuple[int, int], float]
"""Of a rank in a microbatch, by (rank, index of the microbatch)."""


def replay(sizes: Sizes, records: Records) -> None:
    """Write a row `replay` for each number of ranks and planner, of the same batches."""
    loop, cost = _prepared(sizes, records, sizes.replay_model)
    config: Any = loop.model.config
    for ranks, planners in sizes.replay_plans.items():
        cluster, kind = Cluster(ranks=ranks, capacity_tokens=sizes.replay_capacity_tokens), sizes.replay_batch(ranks)
        for planner in planners:
            plan = plan_for(kind.lengths(), cost, cluster, planner=planner, layers=config.num_hidden_layers)
            _add(records, "replay", loop, plan, cost, planner=planner, batch=kind.name)


def replay_waves(sizes: Sizes, records: Records) -> None:
    """Write a row `replay of waves` for FSDP2 and for us, each at its best settings by `lengthwise simulate`.

    All hold as many tokens a rank and recompute nothing.
    """
    loop, cost = _prepared(sizes, records, sizes.waves_model)
    config: Any = loop.model.config
    scenario = Scenario(
        shape=shape_from_config(config.to_dict()), hardware=named_hardware(hardware_here(loop.device)), cost=cost,
        devices=sizes.waves_ranks, kinds=("none",), capacity_tokens=sizes.replay_capacity_tokens, takes_capacity=True,
    )  # fmt: skip
    for kind in sizes.waves_batches:
        compared = compare([kind.lengths()], scenario)
        for row in (*compared.rivals, compared.layouts[LAYOUTS.index("zero3")]):
            if row.planner not in WAVES:
                continue
            about = {"planner": row.planner, "batch": kind.name}
            if row.found is None:
                records.add("replay of waves", **about, refused=str(row.refusal)[:200])
            else:
                plan, its_cost = row.found.first_plan, row.found.setting.cost
                _add(records, "replay of waves", loop, plan, its_cost, repeats=sizes.waves_repeats, **about)


def _prepared(sizes: Sizes, records: Records, model: str) -> tuple[OurLoop, Cost]:
    """Return a loop of the model, and costs that are fitted to it."""
    loop = OurLoop(model, sizes.where, sizes.dtype)
    config: Any = loop.model.config
    measured = _measure(sizes, loop, model)
    base = base_cost(shape_from_config(config.to_dict()), measured.hardware, precision=measured.precision)
    fit = measured.fit
    records.keep(f"{records.part}-measurements.json", measured.to_json())
    for line in loop.said:
        records.add("note", said=line)
    return loop, with_terms(with_curves(base, fit.block_efficiency, fit.ring_efficiency), fit.known)


def _add(
    records: Records, table: str, loop: OurLoop, plan: Plan, cost: Cost, *, repeats: int = 1, **about: str
) -> None:
    config: Any = loop.model.config
    batch = random_batch(plan.tokens, vocab=config.vocab_size)
    seconds = replayed_seconds(loop, plan, batch, repeats=repeats)
    makespan, simulated = makespan_of(plan, seconds, cost), float(simulate_plan(plan, cost).work_end_seconds.max())
    name = re.sub(r"\W+", "-", f"{about['batch']}-{plan.ranks}-{about['planner']}")
    records.add(
        table, ranks=plan.ranks, **about, tokens=sum(plan.tokens), longest_tokens=max(plan.tokens),
        replayed_seconds=makespan, simulated_seconds=simulated, simulation_error=simulated / makespan - 1,
        computing_share=sum(seconds.values()) / (makespan * plan.ranks),
        plan=records.keep(f"replay-{name}.json", plan.to_json()),
    )  # fmt: skip


def _measure(sizes: Sizes, loop: OurLoop, model: str) -> Measurements:
    """Profile the model of a loop on one rank, which changes no weight."""
    world = World(rank=0, world_size=1, gpus=int(loop.device.type == "cuda"))
    settings = ProfileSettings(
        seconds=sizes.replay_profile_seconds, longest_tokens=sizes.replay_capacity_tokens, precision=sizes.precision,
        clock="wall", hardware=hardware_here(loop.device), computing=loop.computing,
    )  # fmt: skip
    trained = loop.model, loop.parameters, sliced_optimizer(OptimizerConfig(), loop.model, loop.parameters, 0)
    return profile(model_source(model), world, loop.transport, settings, trained=trained)


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


def replayed_seconds(loop: OurLoop, plan: Plan, batch: StepBatch, *, repeats: int = 1) -> Seconds:
    """Run the microbatches of all ranks, one rank after the other; of all repeats the slowest counts.

    The first rank runs once more, to warm up.
    """
    found: dict[tuple[int, int], float] = {}
    for number, rank in enumerate((0, *(rank for rank in range(plan.ranks) for _ in range(repeats)))):
        transport = ReplayTransport(rank, plan.ranks, loop.device)
        mine = [index for index, each in enumerate(plan.microbatches) if in_waves(plan) or rank in each.ranks]
        if not mine:
            continue
        finish(loop.device)
        loop.work(plan, batch, transport=transport)
        transport.mark()
        seconds = transport.seconds()
        assert len(seconds) == len(mine), f"{len(seconds)} microbatches ran on rank {rank}, the plan has {len(mine)}"
        for index, each in zip(mine, seconds, strict=True):
            found[rank, index] = max(each, found.get((rank, index), 0.0))
        if number == 0:
            found.clear()
        loop.parameters.clear_gradients()
    return found


def makespan_of(plan: Plan, seconds: Seconds, cost: Cost) -> float:
    """Put measured microbatches in the plan's order, with what transfers take beyond computing by `cost`.

    A wave takes as long as its slowest ranks, and what gathers and sums take beyond them.
    """
    free = [0.0] * plan.ranks
    for index, microbatch in enumerate(plan.microbatches):
        begun, clocks = max(free), microbatch_clocks(microbatch, plan.tokens, cost)
        totals = dict(zip(clocks.ranks, clocks.total.tolist(), strict=True))
        computes = dict(zip(clocks.ranks, clocks.compute.tolist(), strict=True))
        for together in rings_of(microbatch):
            exposed = max(totals[rank] for rank in together) - max(computes[rank] for rank in together)
            slowest = max(seconds[rank, index] for rank in together)
            end = max(free[rank] for rank in together) + slowest + (max(0.0, exposed) if len(together) > 1 else 0.0)
            for rank in together:
                free[rank] = end
        if in_waves(plan):
            passes = max(free) - begun
            free = [begun + float(cost.wave_seconds(passes, microbatch.recompute))] * plan.ranks
    return max(free)


def in_waves(plan: Plan) -> bool:
    """Return whether all ranks run all microbatches side by side."""
    return plan.schedule["kind"] == "waves"


def rings_of(microbatch: Microbatch) -> list[set[int]]:
    """Return the ranks that wait for each other: those of a piece, and of pieces that share one."""
    groups: list[set[int]] = []
    for piece in microbatch.pieces:
        joined = set(piece.ranks).union(*(group for group in groups if group & set(piece.ranks)))
        groups = [group for group in groups if not group & joined] + [joined]
    return groups
