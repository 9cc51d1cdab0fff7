"""Emulation: real processes in which compute is slept and the rest is real; measured beside the simulator.

    python benchmarks/emulate.py [--ranks 16] [--planners static,...] [--recipe github] [--steps 2] [--heads auto]
        [--namespaces]

A check that the simulator is consistent with the program that ranks run, not that its costs of compute are true: sleeps
and simulator are given the same. Every rank is a process of this machine, joined over gloo. Real: the
planner on rank 0 a step ahead, sending plans and agreeing on them, the lowered program with its grouped transfers, the
reduction at the step's end, and the waiting of ranks for each other. Slept: blocks of attention and linear work. Sleeps
do not fight for cores, so the wall clock is the makespan. Not emulated: offload; pipelines are in `pipeline.py`.

Links, one of two ways:
- Emulated: loopback has no tiers, so a message carries --token-bytes a token and the time at which it was posted, and
  its receiver takes it no earlier than latency and bytes of the emulated link after both sides had posted it. The
  step's end is slept, on top of a small real reduction. The model is llama-7b in 4 layers on nodes of 4 devices that
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from testing import run_ranks

from lengthwise.cli.machine import machine_lines
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, Pass, all_terms_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import Content, MicrobatchProgram, Transfer, lower_plan
from lengthwise.session.source import PlanAhead, StepPlanner
from lengthwise.simulator import simulate_plan
from namespaces import shaped_nodes
from pages import Findings, markdown, parse_options

LAYERS, RANKS_PER_NODE, CAPACITY = 4, 4, 8192
_TIMEOUT_SECONDS = 600.0
PLANNERS = "static,single-degree,bytescale,lengthwise"
_LATE_SECONDS = 0.003  # by which a rank may wake late and still catch up; more is real waiting
_LEAD_SECONDS = 0.05  # from the last rank that is ready to the common start
_FLOAT_BYTES = 4
_END_FLOATS = 1024  # that a rank really reduces at the step's end; the rest of it is slept
Posted = tuple[Any, list[tuple[torch.Tensor, Transfer]], float]  # pending, what will arrive, when it was posted


def transfer_bytes(transfer: Transfer, cost: Cost) -> float:
    """Count the bytes of a message in one layer, as costs and simulator do."""
    content, parts = transfer.content, transfer.heads.parts
    if content in (Content.KV, Content.DKV):
        share = cost.forward.ring if content is Content.KV else cost.backward.ring - cost.forward.ring
        repeated = max(1.0, parts / cost.kv_heads) / parts  # groups wider than the KV heads hold some of them twice
        return share * repeated * cost.ring_bytes / cost.layers * transfer.tokens
    passed = cost.forward.exchange if content in (Content.QKV, Content.OUT) else cost.backward.exchange
    inputs = (cost.heads + 2 * cost.kv_heads) / (2 * cost.heads + 2 * cost.kv_heads)  # of queries, keys and values
    share = inputs if content in (Content.QKV, Content.DQKV) else 1 - inputs
    return share * passed * cost.exchange_bytes / cost.layers * transfer.tokens / parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One rank in one layer of one pass: seconds to sleep, and its transfers, by stage; before and after: of heads."""

    own_seconds: float
    before: list[Transfer]
    blocks_seconds: list[float]
    transfers: list[list[Transfer]]
    after: list[Transfer]


class EmulatedRank:
    """One rank: sleeps its blocks, exchanges real messages, takes them when the emulated link would deliver them.

    bytes_share: how much of the bytes that the costs count for a message it carries. real_far: messages between nodes
    take what they take, nothing is slept for them. world: of all ranks that start together; None: `transport`.
    """

    def __init__(
        self, transport: Any, cost: Cost, bytes_share: float, *, real_far: bool = False, world: Any = None
    ) -> None:
        self._world = world or transport
        self._transport, self._cost, self._bytes_share, self._real_far = transport, cost, bytes_share, real_far
        self._until = 0.0
        self._outgoing, self._incoming = torch.zeros(0), torch.zeros(0)

    def run(self, plan: Plan) -> float:
        """Run one step of `plan`; return the wall-clock seconds from all ranks' start to this one's end."""
        layers = [
            self._layer(program, each)
            for program in lower_plan(plan, self._transport.rank)
            for each in self._cost.passes(program.microbatch.recompute)
        ]
        self._make_room(layers)
        mine, everyone = torch.zeros(_END_FLOATS), torch.zeros(_END_FLOATS * self._transport.world_size)
        start = self._until = self._common_start()
        self._sleep(0.0)
        for layer in layers:
            for _ in range(self._cost.layers):
                self._run_layer(layer)
        self._transport.reduce_scatter(mine, everyone)
        self._transport.all_gather(everyone, mine)
        self._until = self._due()
        self._sleep(self._cost.step_end_seconds(plan.ranks))
        return time.monotonic() - start

    def _common_start(self) -> float:
        """Agree on a point in time, a little later than when the last rank is ready; all share one clock."""
        ready = torch.zeros(self._world.world_size, dtype=torch.float64)
        ready[self._world.rank] = time.monotonic()
        self._world.all_reduce(ready)
        return float(ready.max()) + _LEAD_SECONDS

    def _layer(self, program: MicrobatchProgram, each: Pass) -> Layer:
        rank, cost = self._transport.rank, self._cost
        backward = each is cost.backward
        held = sum(segment.num_tokens for segment in program.segments(rank))
        rounds = [
            [t for t in one.transfers if rank in (t.source, t.target)]
            for one in (program.backward_rounds if backward else program.forward_rounds)
        ]
        stages = max(program.ring_steps, len(rounds))
        before, after = (Content.GRAD_OUT, Content.DQKV) if backward else (Content.QKV, Content.OUT)
        return Layer(
            own_seconds=each.linear * (cost.linear_seconds * held + cost.fixed_seconds) / cost.layers,
            before=self._exchanged(program, before) if each.exchange else [],
            blocks_seconds=[
                self._blocks(program, each, ring_step) if ring_step < program.ring_steps else 0.0
                for ring_step in range(stages)
            ],
            transfers=[*rounds, *([] for _ in range(stages - len(rounds)))] if each.ring else [[]] * stages,
            after=self._exchanged(program, after) if each.exchange else [],
        )

    def _exchanged(self, program: MicrobatchProgram, content: Content) -> list[Transfer]:
        part = program.exchange_of(self._transport.rank, content)
        return [*part.sends, *part.receives]

    def _run_layer(self, layer: Layer) -> None:
        self._sleep(layer.own_seconds)
        self._take(self._post(layer.before))
        for seconds, transfers in zip(layer.blocks_seconds, layer.transfers, strict=True):
            posted = self._post(transfers)
            self._sleep(seconds)
            self._take(posted)
        self._take(self._post(layer.after))

    def _blocks(self, program: MicrobatchProgram, each: Pass, ring_step: int) -> float:
        total = 0.0
        for task in program.tasks(self._transport.rank, ring_step):
            length = program.tokens[task.sequence]
            positions = program.microbatch.pieces[task.piece].degree / task.heads.parts
            whole = float(self._cost.attention_seconds(np.array([float(length)]), positions)[0]) / task.heads.parts
            queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
            total += whole * (1 if task.causal else 2) * queries * keys / length**2
        return each.attention * total / self._cost.layers

    def _floats(self, transfer: Transfer) -> int:
        return max(1, round(self._bytes_share * transfer_bytes(transfer, self._cost) / _FLOAT_BYTES))

    def _make_room(self, layers: Sequence[Layer]) -> None:
        """Allocate what messages are sent from and received into, so that no clock runs meanwhile."""
        calls = [call for layer in layers for call in (layer.before, *layer.transfers, layer.after)]
        most = max((sum(map(self._floats, call)) for call in calls), default=0)
        self._outgoing, self._incoming = torch.ones(most), torch.ones(most)

    def _post(self, transfers: Sequence[Transfer]) -> Posted | None:
        """Post one grouped call; return it with what will arrive and when it was posted."""
        if not transfers:
            return None
        rank, posted = self._transport.rank, self._due()
        stamp = torch.tensor([posted], dtype=torch.float64)
        sends, receives, arriving, first = [], [], [], 0
        for each in transfers:
            last = first + self._floats(each)
            if each.source == rank:
                sends += [(stamp, each.target), (self._outgoing[first:last], each.target)]
            else:
                arrived = torch.zeros(1, dtype=torch.float64)
                receives += [(arrived, each.source), (self._incoming[first:last], each.source)]
                arriving.append((arrived, each))
            first = last
        return self._transport.exchange(sends, receives), arriving, posted

    def _take(self, call: Posted | None) -> None:
        """Wait for a grouped call, and until the emulated links would have delivered what has come over them."""
        if call is None:
            return
        pending, arriving, posted = call
        pending.wait()
        links: dict[int, float] = {}
        for stamp, each in arriving:
            if self._real_far and self._leaves_node(each):
                self._until = max(self._until, time.monotonic())
                continue
            along_ring = each.content in (Content.KV, Content.DKV)
            link = each.source if along_ring else -1  # an all-to-all shares this rank's own link
            latency = along_ring and link not in links
            links[link] = links.get(link, 0.0) + self._link_seconds(each, latency=latency)
            self._until = max(self._until, max(posted, float(stamp)) + links[link])
        self._sleep(0.0)

    def _leaves_node(self, transfer: Transfer) -> bool:
        return transfer.source // self._cost.ranks_per_node != transfer.target // self._cost.ranks_per_node

    def _link_seconds(self, transfer: Transfer, *, latency: bool) -> float:
        link = self._cost.far if self._leaves_node(transfer) else self._cost.near
        hop_seconds = link.hop_seconds / self._cost.layers if latency else 0.0
        return hop_seconds + transfer_bytes(transfer, self._cost) / link.bytes_per_second

    def _due(self) -> float:
        """Return when what happens now was to happen, where that is a moment ago, in seconds of the clock."""
        return max(self._until, time.monotonic() - _LATE_SECONDS)

    def _sleep(self, seconds: float) -> None:
        """Sleep to a point in time, so that waking late once is made up for by the next sleep."""
        self._until = self._due() + seconds
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(left)


def emulated_cost(slower: float, *, nics: int, layers: int = LAYERS, stages: int = 1) -> Cost:
    """Make the costs of the emulated model, of nodes with so many links to others; of one stage where it is cut."""
    fast = named_hardware("h100")
    slowed = {
        "peak_flops_per_second": fast.peak_flops_per_second / slower,
        "link_bytes_per_second": fast.link_bytes_per_second / slower,
        "node_link_bytes_per_second": fast.node_link_bytes_per_second / slower,
        "node_uplink_bytes_per_second": nics * fast.link_bytes_per_second / slower,
    }
    shape, hardware = replace(named_shape("llama-7b"), layers=layers), replace(fast, **slowed)
    return all_terms_cost(shape, replace(hardware, ranks_per_node=stages * RANKS_PER_NODE), stages=stages)


def keys_bytes(cost: Cost) -> float:
    """Count the bytes of the keys and values of a token in one layer."""
    return cost.ring_bytes * cost.forward.ring / cost.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What is emulated.

    token_bytes: that a token's keys and values travel as. heads: as in `PlanOptions`. enter: takes a rank to its node,
    whose links are real.
    """

    planner: str
    cluster: Cluster
    cost: Cost
    context: int
    token_bytes: int
    heads: str = "off"
    enter: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """What `PlanAhead` asks of a batch: its lengths, on which all ranks agree."""

    lengths: list[int]

    @property
    def identity(self) -> object:
        """What all ranks agree on."""
        return self.lengths

    def read_ahead(self, segments: object) -> None:
        """Do nothing: there are no tokens."""


def main() -> None:
    """Emulate every planner and print measured beside simulated steps."""
    asked = parse_options(
        __doc__, ranks=16, planners=PLANNERS, recipe="github", tokens_a_rank=24_000, steps=2,
        heads=(["off", "auto"], "whether plans may split heads"),
        slower=(64.0, "than an h100: longer stages, smaller overheads"),
        token_bytes=(64, "that a token's keys and values travel as"),
        namespaces=(False, "shaped links between nodes; needs root"),
    )  # fmt: skip
    kind = "-namespaces" if asked.namespaces else "-heads" if asked.heads == "auto" else ""
    findings, before = Findings(f"emulate{kind}"), os.getloadavg()[0]
    print(*machine_lines()[1:], sep="\n")
    titles = "ranks | planner | measured, s | simulated, s | error | speed-up measured | speed-up simulated"
    findings.add(markdown(f"{titles} | tokens in split heads", rows(asked)))
    loads = f"{before:.1f}, {os.getloadavg()[0]:.1f}"
    about = f"{asked.recipe}, steps: {asked.steps}; load before and after: {loads}"
    findings.sign("Emulated (sleeps, not work) and simulated", about, asked.out)


def rows(arguments: argparse.Namespace) -> Iterator[list[object]]:
    """Yield a row a planner as they are emulated."""
    cost = emulated_cost(arguments.slower, nics=1 if arguments.namespaces else RANKS_PER_NODE)
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
                heads=arguments.heads, enter=enter,
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
            return steps_of(transport, None if process is None else partial(process.plan, planning))

    def steps_of(transport: Any, planner: StepPlanner | None) -> list[Step]:
        stream: Iterator[Any] = iter([Lengths(batch) for batch in batches])
        ahead = PlanAhead(stream, planner, transport, timeout_seconds=_TIMEOUT_SECONDS)
        share, steps = asked.token_bytes / keys_bytes(asked.cost), []
        rank = EmulatedRank(transport, asked.cost, share, real_far=asked.enter is not None)
        for step in range(len(batches)):
            planned = ahead.next(f"step {step}")
            assert planned is not None, f"no plan for step {step} of {len(batches)}"
            mine = torch.zeros(transport.world_size, dtype=torch.float64)
            mine[transport.rank] = rank.run(planned.plan)
            transport.all_reduce(mine)
            simulated = simulate_plan(planned.plan, asked.cost).step_seconds if transport.rank == 0 else 0.0
            steps.append((float(mine.max()), simulated, split_share(planned.plan)))
        ahead.close()
        return steps

    return run_ranks(work, asked.cluster.ranks, timeout_seconds=_TIMEOUT_SECONDS, before_joining=asked.enter)[0]


if __name__ == "__main__":
    main()
