"""Emulation: real processes in which compute is slept and the rest is real; measured beside the simulator.

    python benchmarks/emulate.py [--ranks 16] [--planners static,...] [--recipe github] [--steps 2] [--heads auto]
        [--model qwen3.5-9b] [--repeats 3] [--namespaces]

A check that the simulator is consistent with the program that ranks run, not that its costs of compute are true: sleeps
and simulator are given the same. Every rank is a process of this machine, joined over gloo. Real: the
planner on rank 0 a step ahead, sending plans and agreeing on them, the lowered program with its grouped transfers, the
reduction at the step's end, and the waiting of ranks for each other. Slept: blocks of attention, scans and linear work.
Sleeps do not fight for cores, so the wall clock is the makespan. Not emulated: offload; pipelines are in `pipeline.py`.

Links, one of two ways:
- Emulated: loopback has no tiers, so a message carries --token-bytes a token and the time at which it was posted, and
  its receiver takes it no earlier than latency and bytes of the emulated link after both sides had posted it. The
  step's end is slept, on top of a small real reduction. The model is --model in 4 layers on nodes of 4 devices that
  are --slower times slower than an h100: stages are then long against the time that two cores take to wake a process.
- --namespaces (root): every node is a network namespace, its ranks share one NIC, shaped by `tc tbf` (`namespaces`),
  and messages between nodes take as long as their bytes do on it, at a rate that suits --token-bytes. The simulator is
  told of one NIC a node, so that it must know what two rings over one NIC cost each other.

Sleeping is not exact and waking takes its turn: a rank that is up to 3 ms late for something sleeps that much less the
next time, and its messages count as posted when they were due; what is later than that counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from testing import run_ranks

from emulated import MODELS, RANKS_PER_NODE, EmulatedRank, emulated_cost, keys_bytes
from lengthwise.cli.machine import machine_lines
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.source import PlanAhead, StepPlanner
from lengthwise.simulator import simulate_plan
from namespaces import shaped_nodes
from pages import Findings, markdown, parse_options

CAPACITY = 8192
_TIMEOUT_SECONDS = 600.0
PLANNERS = "static,single-degree,bytescale,lengthwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What is emulated.

    token_bytes: that a token's keys and values travel as. heads: as in `PlanOptions`. repeats: of each step, whose
    median counts. enter: takes a rank to its node, whose links are real.
    """

    planner: str
    cluster: Cluster
    cost: Cost
    context: int
    token_bytes: int
    heads: str = "off"
    repeats: int = 1
    enter: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """What `PlanAhead` asks of a batch: its lengths, on which all ranks agree."""

    lengths: list[int]

    @property
    def identity(self) -> object:
        """What all ranks agree on."""
        return self.lengths

    def planned_by(self, plan: object) -> Lengths:  # noqa: ARG002
        """Return itself: no plan shares prefixes here."""
        return self

    def read_ahead(self, segments: object) -> None:
        """Do nothing: there are no tokens."""


def main() -> None:
    """Emulate every planner and print measured beside simulated steps."""
    asked = parse_options(
        __doc__, ranks=16, planners=PLANNERS, recipe="github", tokens_a_rank=24_000, steps=2, repeats=1,
        heads=(["off", "auto"], "whether plans may split heads"), model=(MODELS, "whose shape, in 4 layers"),
        slower=(64.0, "than an h100: longer stages, smaller overheads"),
        token_bytes=(64, "that a token's keys and values travel as"),
        namespaces=(False, "shaped links between nodes; needs root"),
    )  # fmt: skip
    kind = "-namespaces" if asked.namespaces else "-heads" if asked.heads == "auto" else ""
    kind += "" if asked.model == MODELS[0] else "-states"
    findings, before = Findings(f"emulate{kind}"), os.getloadavg()[0]
    print(*machine_lines()[1:], sep="\n")
    titles = "ranks | planner | measured, s | simulated, s | error | speed-up measured | speed-up simulated"
    findings.add(markdown(f"{titles} | tokens in split heads", rows(asked)))
    loads = f"{before:.1f}, {os.getloadavg()[0]:.1f}"
    about = f"{asked.recipe}, steps: {asked.steps}, repeats: {asked.repeats}; load before and after: {loads}"
    findings.sign("Emulated (sleeps, not work) and simulated", about, asked.out)


def rows(arguments: argparse.Namespace) -> Iterator[list[object]]:
    """Yield a row a planner as they are emulated."""
    nics = 1 if arguments.namespaces else RANKS_PER_NODE
    cost = emulated_cost(arguments.slower, nics=nics, model=arguments.model)
    cluster = Cluster(ranks=arguments.ranks, capacity_tokens=CAPACITY)
    longest = int(0.8 * cluster.longest_tokens)
    batches = [
        draw_lengths(arguments.recipe, arguments.tokens_a_rank * arguments.ranks, seed, longest_tokens=longest)
        for seed in range(arguments.steps)
    ]
    first: tuple[float, float] | None = None
    for planner in arguments.planners.split(","):
        with links(arguments, cost) as enter:
            asked = Emulation(
                planner=planner, cluster=cluster, cost=cost, context=longest, token_bytes=arguments.token_bytes,
                heads=arguments.heads, repeats=arguments.repeats, enter=enter,
            )  # fmt: skip
            steps = emulate(asked, batches)
        measured, simulated, split = (statistics.mean(column) for column in zip(*steps, strict=True))
        first = first or (measured, simulated)
        cells = [f"{measured:.3f}", f"{simulated:.3f}", f"{100 * (measured / simulated - 1):+.1f} %"]
        cells += [f"{first[0] / measured:.2f}", f"{first[1] / simulated:.2f}", f"{100 * split:.0f} %"]
        yield [arguments.ranks, planner, *cells]


def split_share(plan: Plan) -> float:
    """Return which share of the tokens is in pieces that split heads."""
    pieces = (piece for microbatch in plan.microbatches for piece in microbatch.pieces if piece.heads > 1)
    return sum(plan.tokens[i] for piece in pieces for i in piece.sequences) / sum(plan.tokens)


@contextmanager
def links(arguments: argparse.Namespace, cost: Cost) -> Iterator[Callable[[int], None] | None]:
    """Make the links between nodes, if real ones were asked for; yield what takes a rank to its node."""
    if not arguments.namespaces:
        yield None
        return
    rate = cost.uplink_bytes_per_second * arguments.token_bytes / keys_bytes(cost)
    print(f"links of nodes: {8e-6 * rate:.0f} Mbit/s of payload", flush=True)
    with shaped_nodes(-(-arguments.ranks // RANKS_PER_NODE), rate) as nodes:
        yield lambda rank: nodes.enter(rank // RANKS_PER_NODE)


Step = tuple[float, float, float]
"""Measured and simulated seconds, and which share of the tokens is in pieces that split heads."""


def emulate(asked: Emulation, batches: list[list[int]]) -> list[Step]:
    """Run all batches with one planner, a step each."""
    context = asked.context if asked.planner == "static" else None
    options = PlanOptions(planner=asked.planner, layers=asked.cost.layers, context_tokens=context, heads=asked.heads)

    def work(transport: Any) -> list[Step]:
        torch.set_num_threads(1)
        capacities = {"none": asked.cluster.capacity_tokens}
        planning = StepPlanning(ranks=asked.cluster.ranks, cost=asked.cost, capacities=capacities, options=options)
        with nullcontext() if transport.rank else PlannerProcess() as process:
            return steps_of(transport, None if process is None else lambda batch: process.plan(planning, batch.lengths))

    def steps_of(transport: Any, planner: StepPlanner | None) -> list[Step]:
        stream: Iterator[Any] = iter([Lengths(batch) for batch in batches])
        ahead = PlanAhead(stream, planner, transport, timeout_seconds=_TIMEOUT_SECONDS)
        share, steps = asked.token_bytes / keys_bytes(asked.cost), []
        rank = EmulatedRank(transport, asked.cost, share, real_far=asked.enter is not None)
        for step in range(len(batches)):
            planned = ahead.next(f"step {step}")
            assert planned is not None, f"no plan for step {step} of {len(batches)}"
            ends = torch.zeros(asked.repeats, transport.world_size, dtype=torch.float64)
            for repeat in ends:
                repeat[transport.rank] = rank.run(planned.plan)
            transport.all_reduce(ends)
            simulated = simulate_plan(planned.plan, asked.cost).step_seconds if transport.rank == 0 else 0.0
            steps.append((float(ends.amax(1).median()), simulated, split_share(planned.plan)))
        ahead.close()
        return steps

    return run_ranks(work, asked.cluster.ranks, timeout_seconds=_TIMEOUT_SECONDS, before_joining=asked.enter)[0]


if __name__ == "__main__":
    main()
