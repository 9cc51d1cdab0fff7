"""Emulation: real processes in which compute is slept, and everything else is real; measured beside the simulator.

    python benchmarks/emulate.py [--ranks 16] [--planners static,...] [--recipe github] [--steps 2] [--out FILE.json]

Every rank is a process of this machine, joined over gloo. Real: the planner on rank 0 a step ahead, sending plans and
agreeing on them, the lowered program with its grouped transfers, one tensor a message, the reduction at the step's end,
and the waiting of ranks for each other. Slept: blocks of attention and linear work, for what the costs say. Sleeps do
not fight for cores, so the wall clock is the makespan. Loopback has no tiers, so links are emulated as well: a message
carries the time at which it was posted, and its receiver takes it no earlier than latency and bytes of the emulated
link after both sides had posted it. Messages carry --real-bytes a token, not the emulated bytes.

The model is llama-7b in 4 layers on nodes of 4 devices that are 64 times slower than an h100: stages are then long
against the time that a loaded machine of two cores takes to wake a process. Times of the step's end are slept on top of
the real reduction. A rank that wakes up to 3 ms late sleeps that much less the next time; what is later counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lengthwise.cli.machine import machine_lines
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import AllTermsCost, Pass, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import check_plan, draw_lengths, plan_step
from lengthwise.program import MicrobatchProgram, lower_plan
from lengthwise.simulator import simulate_plan
from lengthwise.testing import run_ranks
from lengthwise.train.planning import PlanAhead

LAYERS, SLOWER, RANKS_PER_NODE, CAPACITY = 4, 64.0, 4, 8192
PLANNERS = "static,single-degree,bytescale,lengthwise"


def emulated_cost() -> AllTermsCost:
    """Make the costs of the emulated model."""
    fast = named_hardware("h100")
    slowed = {
        name: getattr(fast, name) / SLOWER
        for name in ("peak_flops_per_second", "link_bytes_per_second", "node_link_bytes_per_second")
    }
    shape = replace(named_shape("llama-7b"), layers=LAYERS)
    return all_terms_cost(shape, replace(fast, ranks_per_node=RANKS_PER_NODE, **slowed))


@dataclass(frozen=True, slots=True)
class Lengths:
    """What `PlanAhead` asks of a batch: its lengths, and ids that all ranks agree on."""

    lengths: list[int]

    @property
    def ids(self) -> list[int]:
        """One id a sequence."""
        return list(range(len(self.lengths)))


class Emulated:
    """One rank: sleeps its blocks, exchanges real messages, takes them when the emulated link would deliver them."""

    def __init__(self, transport: Any, cost: AllTermsCost, real_bytes: int) -> None:
        self._transport, self._cost, self._width = transport, cost, max(1, real_bytes // 4)
        self._until = 0.0

    def run(self, plan: Plan) -> float:
        """Run one step of `plan`; return the wall-clock seconds from all ranks' start to this one's end."""
        programs = lower_plan(plan, self._transport.rank)
        self._transport.all_reduce(torch.zeros(1))  # a common start
        start = self._until = time.monotonic()
        for program in programs:
            for each in self._cost.passes(program.microbatch.recompute):
                self._run_pass(program, each, backward=each is self._cost.backward)
        gradients = torch.zeros(1024 * self._transport.world_size)
        self._transport.reduce_scatter(torch.zeros(1024), gradients)
        self._transport.all_gather(gradients, torch.zeros(1024))
        self._until = time.monotonic()
        self._sleep(self._cost.step_end_seconds(plan.ranks))
        return time.monotonic() - start

    def _run_pass(self, program: MicrobatchProgram, each: Pass, *, backward: bool) -> None:
        rank, cost = self._transport.rank, self._cost
        held = sum(segment.num_tokens for segment in program.segments(rank))
        own = each.linear * (cost.work.linear_seconds * held + cost.fixed_seconds) / cost.layers
        rounds = program.backward_rounds if backward else program.forward_rounds
        blocks = [self._blocks(program, each, hop) for hop in range(program.hops)]
        for _ in range(cost.layers):
            self._sleep(own)
            for hop in range(max(program.hops, len(rounds))):
                transfers = rounds[hop].transfers if hop < len(rounds) else ()
                arrivals = self._post([each for each in transfers if rank in (each.source, each.target)])
                self._sleep(blocks[hop] if hop < program.hops else 0.0)
                self._take(arrivals)

    def _blocks(self, program: MicrobatchProgram, each: Pass, hop: int) -> float:
        total = 0.0
        for task in program.tasks(self._transport.rank, hop):
            length = program.tokens[task.sequence]
            degree = program.microbatch.pieces[task.piece].degree
            whole = float(self._cost.attention_seconds(np.array([float(length)]), degree)[0])
            queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
            total += whole * (1 if task.causal else 2) * queries * keys / length**2
        return each.attention * total / self._cost.layers

    def _post(self, transfers: Sequence[Any]) -> tuple[Any, list[tuple[torch.Tensor, float]], float] | None:
        """Post one grouped call; return it with what will arrive and how long its link takes."""
        if not transfers:
            return None
        rank, posted = self._transport.rank, time.monotonic()
        stamp = torch.tensor([posted], dtype=torch.float64)
        sends, receives, arriving = [], [], []
        seconds: dict[int, float] = {}
        for each in transfers:
            if each.target == rank:
                seconds[each.source] = seconds.get(each.source, 0.0) + self._link_seconds(
                    each, first=each.source not in seconds
                )
        for each in transfers:
            payload = torch.zeros(each.tokens * self._width)
            if each.source == rank:
                sends += [(stamp, each.target), (payload, each.target)]
            else:
                arrived = torch.zeros(1, dtype=torch.float64)
                receives += [(arrived, each.source), (payload, each.source)]
                arriving.append((arrived, seconds[each.source]))
        return self._transport.exchange(sends, receives), arriving, posted

    def _link_seconds(self, transfer: Any, *, first: bool) -> float:
        cost = self._cost
        near = transfer.source // cost.ranks_per_node == transfer.target // cost.ranks_per_node
        link = cost.near if near else cost.far
        share = cost.forward.ring if transfer.content == "kv" else cost.backward.ring - cost.forward.ring
        latency = link.hop_seconds / cost.layers if first else 0.0
        return latency + share * cost.ring_bytes / cost.layers * transfer.tokens / link.bytes_per_second

    def _take(self, call: tuple[Any, list[tuple[torch.Tensor, float]], float] | None) -> None:
        if call is None:
            return
        pending, arriving, posted = call
        pending.wait()
        for stamp, seconds in arriving:
            self._until = max(self._until, max(posted, float(stamp)) + seconds)
        self._sleep(0.0)

    def _sleep(self, seconds: float) -> None:
        """Sleep to a point in time, so that waking late once is made up for by the next sleep."""
        now = time.monotonic()
        self._until = max(self._until, now - _LATE) + seconds
        if self._until > now:
            time.sleep(self._until - now)


_LATE = 0.003  # seconds by which a rank may wake late and still catch up; more is real waiting


def main() -> None:
    """Emulate every planner and print measured beside simulated steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--planners", default=PLANNERS)
    parser.add_argument("--recipe", default="github")
    parser.add_argument("--tokens-a-rank", type=int, default=24_000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--real-bytes", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cost = emulated_cost()
    cluster = Cluster(ranks=arguments.ranks, capacity_tokens=CAPACITY)
    longest = int(0.8 * cluster.longest_tokens)
    batches = [
        draw_lengths(arguments.recipe, arguments.tokens_a_rank * arguments.ranks, seed, longest_tokens=longest)
        for seed in range(arguments.steps)
    ]
    rows = {}
    print(*machine_lines()[1:], sep="\n")
    print(f"{arguments.ranks} processes, {arguments.steps} steps of {arguments.recipe}; seconds of a step, mean")
    print("planner", "measured", "simulated", "error %", "speed-up measured", "speed-up simulated", sep=" | ")
    for planner in arguments.planners.split(","):
        rows[planner] = emulate(planner, batches, cluster, cost, longest, arguments.real_bytes)
        measured, simulated = (statistics.mean(column) for column in zip(*rows[planner], strict=True))
        first = [statistics.mean(column) for column in zip(*next(iter(rows.values())), strict=True)]
        ratios = f"{first[0] / measured:.2f} | {first[1] / simulated:.2f}"
        print(
            f"{planner} | {measured:.3f} | {simulated:.3f} | {100 * (measured / simulated - 1):+.1f} | {ratios}",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps({"ranks": arguments.ranks, "steps": rows}, indent=1))


def emulate(
    planner: str, batches: list[list[int]], cluster: Cluster, cost: AllTermsCost, context: int, real_bytes: int
) -> list[tuple[float, float]]:
    """Run all batches with one planner; return (measured, simulated) seconds of each step."""

    def make_plan(lengths: Sequence[int]) -> Plan:
        fixed = context if planner == "static" else None
        plan = plan_step(lengths, cluster, cost, planner=planner, layers=LAYERS, context_tokens=fixed)
        check_plan(plan)
        return plan

    def work(transport: Any) -> list[tuple[float, float]]:
        torch.set_num_threads(1)
        stream: Iterator[Any] = iter([Lengths(batch) for batch in batches])
        ahead = PlanAhead(stream, make_plan, transport)
        rank, steps = Emulated(transport, cost, real_bytes), []
        for step in range(len(batches)):
            planned = ahead.take(f"step {step}")
            assert planned is not None, f"no plan for step {step} of {len(batches)}"
            mine = torch.zeros(transport.world_size, dtype=torch.float64)
            mine[transport.rank] = rank.run(planned.plan)
            transport.all_reduce(mine)
            steps.append(
                (float(mine.max()), simulate_plan(planned.plan, cost).step_seconds if transport.rank == 0 else 0.0)
            )
        ahead.close()
        return steps

    return run_ranks(work, cluster.ranks)[0]


if __name__ == "__main__":
    main()
