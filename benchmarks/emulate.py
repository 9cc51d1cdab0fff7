"""Emulation: real processes in which compute and links are slept and the rest is real; measured beside the simulator.

    python benchmarks/emulate.py [--ranks 16] [--planners static,...] [--recipe github] [--steps 2] [--namespaces]

A check that the simulator is consistent with the program that ranks run, not that its costs are true: sleeps and
simulator are given the same costs. Not emulated: split heads, offload, pipelines.

Every rank is a process of this machine, joined over gloo. Real: the planner on rank 0 a step ahead, sending plans and
agreeing on them, the lowered program with its grouped transfers, one tensor a message, the reduction at the step's end,
and the waiting of ranks for each other. Slept: blocks of attention and linear work, for what the costs say. Sleeps do
not fight for cores, so the wall clock is the makespan. Loopback has no tiers, so links are emulated as well: a message
carries the time at which it was posted, and its receiver takes it no earlier than latency and bytes of the emulated
link after both sides had posted it. Messages carry --real-bytes a token, not the emulated bytes.

--namespaces (root): every node is a network namespace, its ranks share one NIC, shaped by `tc tbf` (`namespaces`), and
messages between nodes are not delayed but take as long as their bytes do on it, at a rate that suits --real-bytes.
The simulator is then told of one NIC a node, so that it must know what two rings over one NIC cost each other.

The model is llama-7b in 4 layers on nodes of 4 devices that are --slower times slower than an h100: stages are then
long against the time that a machine of two cores takes to wake a process. Times of the step's end are slept on top of
the real reduction. Sleeping is not exact and waking takes its turn: a rank that is up to 3 ms late for something sleeps
that much less the next time, and its messages count as posted when they were due; what is later than that counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lengthwise.cli.machine import machine_lines
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, Pass, all_terms_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions
from lengthwise.program import MicrobatchProgram, Transfer, lower_plan
from lengthwise.simulator import simulate_plan
from lengthwise.training.planner_process import PlannerProcess
from lengthwise.training.planning import PlanAhead, StepPlanner
from lengthwise.training.step_planning import StepPlanning
from namespaces import shaped_nodes
from pages import Findings, add_out
from support import run_ranks

LAYERS, RANKS_PER_NODE, CAPACITY = 4, 4, 8192
_TIMEOUT_SECONDS = 600.0
Call = tuple[Any, list[tuple[torch.Tensor, Transfer]], float]  # pending, what will arrive, when it was posted
PLANNERS = "static,single-degree,bytescale,lengthwise"


def emulated_cost(slower: float, *, nics: int) -> Cost:
    """Make the costs of the emulated model, of nodes with so many links to others."""
    fast = named_hardware("h100")
    slowed = {
        "peak_flops_per_second": fast.peak_flops_per_second / slower,
        "link_bytes_per_second": fast.link_bytes_per_second / slower,
        "node_link_bytes_per_second": fast.node_link_bytes_per_second / slower,
        "node_uplink_bytes_per_second": nics * fast.link_bytes_per_second / slower,
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


@dataclass(frozen=True, slots=True)
class Layer:
    """One rank in one layer of one pass of a microbatch: seconds to sleep, and its transfers, by stage."""

    own_seconds: float
    blocks_seconds: list[float]
    transfers: list[list[Transfer]]


class Emulated:
    """One rank: sleeps its blocks, exchanges real messages, takes them when the emulated link would deliver them.

    `real_bytes`: of the keys and values of a token. `shaped`: links between nodes are real ones.
    """

    def __init__(self, transport: Any, cost: Cost, real_bytes: int, *, shaped: bool) -> None:
        self._transport, self._cost, self._shaped = transport, cost, shaped
        gradients = real_bytes * (cost.backward.ring - cost.forward.ring) / cost.forward.ring
        self._width = {"kv": max(1, real_bytes // 4), "gradients": max(1, round(gradients / 4))}
        self._until = 0.0

    def run(self, plan: Plan) -> float:
        """Run one step of `plan`; return the wall-clock seconds from all ranks' start to this one's end."""
        layers = [
            self._layer(program, each, backward=each is self._cost.backward)
            for program in lower_plan(plan, self._transport.rank)
            for each in self._cost.passes(program.microbatch.recompute)
        ]
        start = self._until = self._common_start()
        self._sleep(0.0)
        for layer in layers:
            for _ in range(self._cost.layers):
                self._run_layer(layer)
        gradients = torch.zeros(1024 * self._transport.world_size)
        self._transport.reduce_scatter(torch.zeros(1024), gradients)
        self._transport.all_gather(gradients, torch.zeros(1024))
        self._until = self._due()
        self._sleep(self._cost.step_end_seconds(plan.ranks))
        return time.monotonic() - start

    def _common_start(self) -> float:
        """Agree on a point in time, a little later than when the last rank is ready; all share one clock."""
        ready = torch.zeros(self._transport.world_size, dtype=torch.float64)
        ready[self._transport.rank] = time.monotonic()
        self._transport.all_reduce(ready)
        return float(ready.max()) + _LEAD

    def _layer(self, program: MicrobatchProgram, each: Pass, *, backward: bool) -> Layer:
        rank, cost = self._transport.rank, self._cost
        held = sum(segment.num_tokens for segment in program.segments(rank))
        rounds = program.backward_rounds if backward else program.forward_rounds
        stages = max(program.ring_steps, len(rounds))
        return Layer(
            own_seconds=each.linear * (cost.linear_seconds * held + cost.fixed_seconds) / cost.layers,
            blocks_seconds=[
                self._blocks(program, each, ring_step) if ring_step < program.ring_steps else 0.0
                for ring_step in range(stages)
            ],
            transfers=[
                [t for t in rounds[ring_step].transfers if rank in (t.source, t.target)]
                if ring_step < len(rounds)
                else []
                for ring_step in range(stages)
            ],
        )

    def _run_layer(self, layer: Layer) -> None:
        self._sleep(layer.own_seconds)
        for seconds, transfers in zip(layer.blocks_seconds, layer.transfers, strict=True):
            call = self._post(transfers)
            self._sleep(seconds)
            self._take(call)

    def _blocks(self, program: MicrobatchProgram, each: Pass, ring_step: int) -> float:
        total = 0.0
        for task in program.tasks(self._transport.rank, ring_step):
            length = program.tokens[task.sequence]
            degree = program.microbatch.pieces[task.piece].degree
            whole = float(self._cost.attention_seconds(np.array([float(length)]), degree)[0])
            queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
            total += whole * (1 if task.causal else 2) * queries * keys / length**2
        return each.attention * total / self._cost.layers

    def _post(self, transfers: Sequence[Transfer]) -> Call | None:
        """Post one grouped call; return it with what will arrive and how long its link takes."""
        if not transfers:
            return None
        rank, posted = self._transport.rank, self._due()
        stamp = torch.tensor([posted], dtype=torch.float64)
        sends, receives, arriving = [], [], []
        for each in transfers:
            payload = torch.zeros(each.tokens * self._width["kv" if each.content == "kv" else "gradients"])
            if each.source == rank:
                sends += [(stamp, each.target), (payload, each.target)]
                continue
            arrived = torch.zeros(1, dtype=torch.float64)
            receives += [(arrived, each.source), (payload, each.source)]
            arriving.append((arrived, each))
        return self._transport.exchange(sends, receives), arriving, posted

    def _take(self, call: Call | None) -> None:
        """Wait for a grouped call, and until the emulated links would have delivered what has come over them."""
        if call is None:
            return
        pending, arriving, posted = call
        pending.wait()
        links: dict[int, float] = {}
        for stamp, each in arriving:
            if self._shaped and self._leaves_node(each):
                self._until = max(self._until, time.monotonic())
                continue
            first = each.source not in links
            links[each.source] = links.get(each.source, 0.0) + self._link_seconds(each, first=first)
            self._until = max(self._until, max(posted, float(stamp)) + links[each.source])
        self._sleep(0.0)

    def _leaves_node(self, transfer: Transfer) -> bool:
        return transfer.source // self._cost.ranks_per_node != transfer.target // self._cost.ranks_per_node

    def _link_seconds(self, transfer: Transfer, *, first: bool) -> float:
        cost = self._cost
        link = cost.far if self._leaves_node(transfer) else cost.near
        share = cost.forward.ring if transfer.content == "kv" else cost.backward.ring - cost.forward.ring
        latency = link.hop_seconds / cost.layers if first else 0.0
        return latency + share * cost.ring_bytes / cost.layers * transfer.tokens / link.bytes_per_second

    def _due(self) -> float:
        """Return when what happens now was to happen, where that is a moment ago, in seconds of the clock."""
        return max(self._until, time.monotonic() - _LATE)

    def _sleep(self, seconds: float) -> None:
        """Sleep to a point in time, so that waking late once is made up for by the next sleep."""
        self._until = self._due() + seconds
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(left)


_LATE = 0.003  # seconds by which a rank may wake late and still catch up; more is real waiting
_LEAD = 0.05  # seconds from the last rank that is ready to the common start


def main() -> None:
    """Emulate every planner and print measured beside simulated steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--planners", default=PLANNERS)
    parser.add_argument("--recipe", default="github")
    parser.add_argument("--tokens-a-rank", type=int, default=24_000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--slower", type=float, default=64.0, help="than an h100: longer stages, smaller overheads")
    parser.add_argument("--real-bytes", type=int, default=64, help="that a token's keys and values travel as")
    parser.add_argument("--namespaces", action="store_true", help="shaped links between nodes; needs root")
    add_out(parser, "emulate")
    arguments = parser.parse_args()
    cost = emulated_cost(arguments.slower, nics=1 if arguments.namespaces else RANKS_PER_NODE)
    cluster = Cluster(ranks=arguments.ranks, capacity_tokens=CAPACITY)
    longest = int(0.8 * cluster.longest_tokens)
    batches = [
        draw_lengths(arguments.recipe, arguments.tokens_a_rank * arguments.ranks, seed, longest_tokens=longest)
        for seed in range(arguments.steps)
    ]
    rows = {}
    print(*machine_lines()[1:], sep="\n")
    findings = Findings("emulate-namespaces" if arguments.namespaces else "emulate")
    titles = "| ranks | planner | measured, s | simulated, s | error | speed-up measured | speed-up simulated |"
    findings.add([titles, "|---" * 7 + "|"])
    for planner in arguments.planners.split(","):
        with links(arguments, cost) as enter:
            rows[planner] = emulate(planner, batches, cluster, cost, longest, arguments.real_bytes, enter)
        measured, simulated = (statistics.mean(column) for column in zip(*rows[planner], strict=True))
        first = [statistics.mean(column) for column in zip(*next(iter(rows.values())), strict=True)]
        error = f"{100 * (measured / simulated - 1):+.1f} %"
        ratios = f"{first[0] / measured:.2f} | {first[1] / simulated:.2f}"
        findings.add([f"| {arguments.ranks} | {planner} | {measured:.3f} | {simulated:.3f} | {error} | {ratios} |"])
    findings.sign("Emulated (sleeps, not work) and simulated", f"mean of {arguments.steps} steps of {arguments.recipe}")
    findings.write(arguments.out)


@contextmanager
def links(arguments: argparse.Namespace, cost: Cost) -> Iterator[Callable[[int], None] | None]:
    """Make the links between nodes, if real ones were asked for; yield what takes a rank to its node."""
    if not arguments.namespaces:
        yield None
        return
    keys_bytes = cost.ring_bytes * cost.forward.ring / cost.layers  # emulated, of a token
    rate = cost.uplink_bytes_per_second * arguments.real_bytes / keys_bytes
    print(f"links of nodes: {8e-6 * rate:.0f} Mbit/s of payload", flush=True)
    with shaped_nodes(-(-arguments.ranks // RANKS_PER_NODE), rate) as nodes:
        yield lambda rank: nodes.enter(rank // RANKS_PER_NODE)


def emulate(
    planner: str,
    batches: list[list[int]],
    cluster: Cluster,
    cost: Cost,
    context: int,
    real_bytes: int,
    enter: Callable[[int], None] | None,
) -> list[tuple[float, float]]:
    """Run all batches with one planner; return (measured, simulated) seconds of each step."""

    sized = context if planner == "static" else None
    options = PlanOptions(planner=planner, layers=LAYERS, context_tokens=sized)
    capacities = {"none": cluster.capacity_tokens}
    planning = StepPlanning(ranks=cluster.ranks, cost=cost, capacities=capacities, options=options)

    def work(transport: Any) -> list[tuple[float, float]]:
        torch.set_num_threads(1)
        with nullcontext() if transport.rank else PlannerProcess() as process:
            return steps_of(transport, None if process is None else partial(process.plan, planning))

    def steps_of(transport: Any, planner: StepPlanner | None) -> list[tuple[float, float]]:
        stream: Iterator[Any] = iter([Lengths(batch) for batch in batches])
        ahead = PlanAhead(stream, planner, transport, timeout_seconds=_TIMEOUT_SECONDS)
        rank, steps = Emulated(transport, cost, real_bytes, shaped=enter is not None), []
        for step in range(len(batches)):
            planned = ahead.next(f"step {step}")
            assert planned is not None, f"no plan for step {step} of {len(batches)}"
            mine = torch.zeros(transport.world_size, dtype=torch.float64)
            mine[transport.rank] = rank.run(planned.plan)
            transport.all_reduce(mine)
            steps.append(
                (float(mine.max()), simulate_plan(planned.plan, cost).step_seconds if transport.rank == 0 else 0.0)
            )
        ahead.close()
        return steps

    return run_ranks(work, cluster.ranks, timeout_seconds=_TIMEOUT_SECONDS, before_joining=enter)[0]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
