"""Pipelines: run plans beside the simulator on emulated ranks, and in wall clock beside plain 1F1B and torch's own.

    python benchmarks/pipeline.py --part emulated [--repeats 5] [--slower 8]
    python benchmarks/pipeline.py --part clock [--repeats 5] [--batches 2] [--batch-tokens 6144] [--capacity 2048]

`emulated`, as in `emulate`: ranks are processes that post the real transfers of `step_program` over gloo, and sleep
compute and links for what the simulator is given; the quickest repeat counts. It shows that stages run in the order
and wait as the simulator says, and how plans differ where no stage takes another's core.

`clock`: forward, backward and the sum of gradients of a small Llama in fp32, one thread a rank. All ways take turns on
the same batches; the ratio is the median of the repeats. `1F1B packed` and `1F1B padded` are this executor on plain
plans: packs of level tokens, or sequences of like lengths padded to the longest of their microbatch, as many on each
replica (those of `sharding`). torch's schedules are `torch.distributed.pipelining` with torch's sdpa and a sequence a
microbatch, all padded to the longest of the batch, as its buffers have one shape. Losses must agree to 1e-4, or it
fails.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from testing import run_ranks
from testing.laid import stage_parameters
from testing.pipelines import as_pipeline
from testing.plans import make_plan
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from emulated import EmulatedRank, emulated_cost, keys_bytes
from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, Transport
from lengthwise.core.plan import Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, layer_shapes, named_hardware, shape_from_config
from lengthwise.cost.analytic import layer_flops
from lengthwise.data import NO_LOSS
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.recipes import draw_lengths
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import ModelStage, build_model
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.program import lower_plan
from lengthwise.program.stage_program import cut_layers
from lengthwise.program.step_program import Place, Turn, step_program
from lengthwise.simulator import simulate_plan
from pages import Findings, markdown, parse_options
from sharding import CONFIG, CPU, LAYERS, SOURCE, TOLERANCE, WORDS, pack, pad

EMULATED = ((4, 2, 1), (4, 2, 2), (4, 4, 1), (2, 4, 2))  # replicas, stages, virtual
EMULATED_LAYERS, CAPACITY, TOKEN_BYTES = 8, 8192, 64
CLOCKED = ((1, 2, 1), (1, 2, 2), (2, 2, 1))
OURS, PACKED, PADDED = "lengthwise", "1F1B packed", "1F1B padded"
TORCH = {"torch GPipe": ScheduleGPipe, "torch 1F1B": Schedule1F1B}
WAYS = (OURS, PACKED, PADDED, *TORCH)


class EmulatedStage(EmulatedRank):
    """A stage of a replica: sleeps its actions, and takes hidden states when the emulated link would deliver them."""

    def __init__(self, mesh: Mesh, cost: Cost, bytes_share: float) -> None:
        super().__init__(mesh.replicas, cost, bytes_share, world=mesh.world)
        self._mesh, self._link_free, self._sent = mesh, 0.0, list[Any]()

    def run(self, plan: Plan) -> float:
        """Run one step of `plan`; return the wall-clock seconds from all ranks' start to this one's end."""
        programs = {each.index: each for each in lower_plan(plan, self._mesh.replica)}
        passes = {
            number: [self._layer(program, each) for each in self._cost.passes(program.microbatch.recompute)]
            for number, program in programs.items()
        }
        self._make_room([layer for each in passes.values() for layer in each])
        held = {
            number: sum(each.num_tokens for each in program.segments(self._mesh.replica))
            for number, program in programs.items()
        }
        layers, arriving = self._cost.layers // plan.schedule["virtual"], dict[tuple[Place, bool], Any]()
        turns = step_program(plan, self._mesh.replica, self._mesh.stage).turns
        start = self._until = self._common_start()
        self._sleep(0.0)
        for turn in turns:
            if (action := turn.action) is not None:
                if message := arriving.pop((action.place, action.is_forward), None):
                    message[0].wait()
                    self._until = max(self._until, float(message[1]), message[2])
                    self._sleep(0.0)
                forward, *backward = passes[action.place.microbatch]
                for layer in layers * ([forward] if action.is_forward else backward):
                    self._run_layer(layer)
            arriving |= self._post_hidden(turn, held)
        for each in self._sent:
            each.wait()
        self._until = self._due()
        self._sleep(self._cost.step_end_seconds(plan.ranks))
        return time.monotonic() - start

    def _post_hidden(self, turn: Turn, held: dict[int, int]) -> dict[tuple[Place, bool], Any]:
        """Post the messages of a turn, of which each says when it arrives; return what to wait for.

        A message takes its time from when both sides have come to it: the third of what is returned is for this one.
        """
        sends = [
            (self._stamped(held[each.place.microbatch]), self._mesh.rank_of_stage(each.stage)) for each in turn.sends
        ]
        rooms = [torch.zeros(1, dtype=torch.float64) for _ in turn.receives]
        sources = [self._mesh.rank_of_stage(each.stage) for each in turn.receives]
        if not sends and not rooms:
            return {}
        self._sent.append(self._mesh.between.exchange(sends, list(zip(rooms, sources, strict=True))))
        keys = [(each.place, each.is_forward) for each in turn.receives]
        return {
            key: (self._sent[-1], room, self._due() + self._send_seconds(held[key[0].microbatch]))
            for key, room in zip(keys, rooms, strict=True)
        }

    def _stamped(self, tokens: int) -> Tensor:
        """Return when hidden states of so many tokens arrive, sent one after the other."""
        self._link_free = max(self._due(), self._link_free) + self._send_seconds(tokens)
        return torch.tensor([self._link_free], dtype=torch.float64)

    def _send_seconds(self, tokens: int) -> float:
        return float(self._cost.stage_send_seconds(np.array([float(tokens)]))[0])


def emulated_table(asked: Any) -> Iterator[str]:
    """Yield how long plans take on emulated ranks, beside the simulator and beside each other."""

    def rows() -> Iterator[list[object]]:
        for replicas, stages, virtual in EMULATED:
            cost = emulated_cost(asked.slower, nics=4, layers=EMULATED_LAYERS, stages=stages)
            cluster = Cluster(ranks=replicas, capacity_tokens=CAPACITY)
            for recipe, longest in (
                ("github", int(0.8 * cluster.longest_tokens)),
                ("github", 8192),
                ("wikipedia", 8192),
            ):
                lengths = draw_lengths(recipe, 32_000 * replicas, 0, longest_tokens=longest)
                ours = 0.0
                for way in (OURS, PACKED, PADDED) if longest <= CAPACITY else (OURS,):
                    plan = plan_by(way, lengths, cluster, cost, layers=EMULATED_LAYERS, virtual=virtual)
                    simulated = simulate_plan(plan, cost).step_seconds
                    measured = min(emulate_plan(plan, cost, replicas * stages, asked.repeats))
                    ours = ours or measured
                    lengths_to = f"{recipe} to {longest // 1024}K"
                    error = f"{100 * (measured / simulated - 1):+.1f} %"
                    figures = [f"{measured:.3f}", f"{simulated:.3f}", error, f"{measured / ours:.2f}"]
                    yield [f"{replicas} x {stages} x {virtual}", lengths_to, way, *figures]

    heads = "replicas x stages x virtual | lengths | plan | measured, s | simulated, s | error | over lengthwise"
    return markdown(heads, rows())


def emulate_plan(plan: Plan, cost: Cost, ranks: int, repeats: int) -> list[float]:
    """Return how long a plan takes on emulated ranks, each time."""

    def work(transport: Transport) -> list[float]:
        torch.set_num_threads(1)
        stage = EmulatedStage(Mesh(transport, cost.stages), cost, TOKEN_BYTES / keys_bytes(cost))
        took = torch.zeros(repeats, transport.world_size, dtype=torch.float64)
        for repeat in range(repeats):
            took[repeat, transport.rank] = stage.run(plan)
        transport.all_reduce(took)
        return took.max(1).values.tolist()

    return run_ranks(work, ranks, timeout_seconds=600.0)[0]


def plan_by(way: str, lengths: Sequence[int], cluster: Cluster, cost: Cost, *, layers: int, virtual: int) -> Plan:
    """Plan as the planner does, or packs and padded groups through plain 1F1B; sequences are as long as padded."""
    stages = cost.stages
    if way == OURS:
        options = PlanOptions(mode="pipeline", layers=layers, stages=stages, virtual=virtual)
        return plan_step(tuple(lengths), cluster, cost, options)
    groups, tokens = (pad if way == PADDED else pack)(lengths, cluster), list(lengths)
    for group in (each for of_replica in groups for each in of_replica if way == PADDED):
        for number in group:
            tokens[number] = max(lengths[each] for each in group)
    turns = (pair for turn in zip(*groups, strict=True) for pair in enumerate(turn))
    rows = [Piece(ranks=(replica,), sequences=tuple(group)) for replica, group in turns if group]
    return as_pipeline(make_plan(cluster.ranks, tokens, rows, layers=layers), stages, virtual)


def batch_of(rows: Sequence[np.ndarray], widths: Sequence[int]) -> StepBatch:
    """Return rows as a batch, padded to these widths, without a loss there."""
    builder = DatasetBuilder()
    builder.start_source("random", "random", None)
    for row, width in zip(rows, widths, strict=True):
        missing = (0, width - len(row))
        builder.add(np.pad(row, missing), np.pad(row, missing, constant_values=NO_LOSS))
    return StepBatch(builder.finish(), range(len(rows)))


class _Ours:
    """This executor, on the planner's plans or on plain ones."""

    def __init__(self, mesh: Mesh, virtual: int, cluster: Cluster, head_share: float) -> None:
        self._mesh, self._virtual, self._cluster = mesh, virtual, cluster
        chunks = cut_layers([1.0] * LAYERS, mesh.stages * virtual, last_seconds=head_share)
        model: Any = build_model(SOURCE, seed=0, attention=ATTENTION_NAME)
        self._stage = ModelStage(model, chunks, stages=mesh.stages, stage=mesh.stage)
        self._parameters = stage_parameters(self._stage, mesh, dtype=torch.float32)
        self._kernel = choose_kernel(CPU)
        self._cost = all_terms_cost(shape_from_config(CONFIG.to_dict()), named_hardware("cpu"), stages=mesh.stages)

    def prepared(self, way: str, rows: Sequence[np.ndarray]) -> Callable[[], float]:
        """Return what runs a step of these rows, planned already; it returns this rank's part of the loss."""
        lengths = [len(row) for row in rows]
        plan = plan_by(way, lengths, self._cluster, self._cost, layers=LAYERS, virtual=self._virtual)
        batch = batch_of(rows, plan.tokens)

        def step() -> float:
            self._parameters.clear_gradients()
            options = {"name": way, "parameters": self._parameters}
            context = StepContext(self._stage.model, self._mesh, self._kernel, chunks=self._stage.own, **options)
            done = run_part(plan, batch, context)
            self._parameters.reduce_gradients()
            return done.loss_sum / batch.loss_weight

        return step


class _Part(nn.Module):
    """Some layers of the same model, as torch's pipelining takes them."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        inner = model.model
        self.layers = nn.ModuleList([inner.layers[number] for number in layers])
        self.embedding = inner.embed_tokens if layers.start == 0 else None
        self.norm, self.head = (inner.norm, model.lm_head) if layers.stop == LAYERS else (None, None)
        self.rotary = inner.rotary_emb

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


class _Torch:
    """torch.distributed.pipelining over the stages of each replica, and a sum of gradients over the replicas."""

    def __init__(self, mesh: Mesh, head_share: float) -> None:
        self._mesh = mesh
        groups: list[Any] = [
            dist.new_group([r * mesh.stages + s for s in range(mesh.stages)]) for r in range(mesh.num_replicas)
        ]
        over: list[Any] = [
            dist.new_group(list(range(s, mesh.world.world_size, mesh.stages))) for s in range(mesh.stages)
        ]
        self._group, self._replicas = groups[mesh.replica], over[mesh.stage]
        cut = cut_layers([1.0] * LAYERS, mesh.stages, last_seconds=head_share)
        self._part = _Part(build_model(SOURCE, seed=0, attention="sdpa"), cut[mesh.stage])

    def prepared(self, way: str, rows: Sequence[np.ndarray]) -> Callable[[], float]:
        """Return what runs a step of these rows; it returns this rank's part of the loss."""
        mesh, longest = self._mesh, max(map(len, rows))
        weight = sum(len(row) - 1 for row in rows)
        own = list(rows[mesh.replica :: mesh.num_replicas])
        microbatches = max(mesh.stages, -(-len(rows) // mesh.num_replicas))
        own += [rows[0][:0]] * (microbatches - len(own))  # as many on each
        ids = torch.stack([torch.from_numpy(np.pad(row, (0, longest - len(row)))).long() for row in own])
        labels = torch.full_like(ids, -100)
        for number, row in enumerate(own):
            labels[number, : max(0, len(row) - 1)] = ids[number, 1 : len(row)]

        def loss(logits: Tensor, asked: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="sum") / weight

        stage = PipelineStage(self._part, mesh.stage, mesh.stages, CPU, group=self._group)
        schedule = TORCH[way](stage, n_microbatches=len(own), loss_fn=loss, scale_grads=False)

        def step() -> float:
            self._part.zero_grad()
            losses = list[Tensor]()
            if mesh.is_first:
                schedule.step(ids, return_outputs=False)
            else:
                schedule.step(target=labels, losses=losses, return_outputs=False)
            if mesh.num_replicas > 1:
                flat = torch.cat([each.grad.flatten() for each in self._part.parameters() if each.grad is not None])
                dist.all_reduce(flat, group=self._replicas)
            return float(sum(each.detach() for each in losses))

        return step


Clocked = dict[str, tuple[list[float], list[float]]]
"""Of each way: seconds of each repeat over all batches, and their losses."""


def clock(transport: Transport, cut: tuple[int, int, int], batches: Sequence[list[int]], asked: Any) -> Clocked:
    """Run all batches in every way, in turns; the first repeat warms up and is not counted."""
    torch.set_num_threads(1)
    replicas, stages, virtual = cut
    mesh, cluster = Mesh(transport, stages), Cluster(ranks=replicas, capacity_tokens=asked.capacity)
    random = np.random.default_rng(0)
    rows = [[random.integers(0, WORDS, length, dtype=np.int32) for length in lengths] for lengths in batches]
    (layer, *_), head = layer_flops(layer_shapes(CONFIG.to_dict()), [each for lengths in batches for each in lengths])
    ours, theirs = _Ours(mesh, virtual, cluster, head / layer), _Torch(mesh, head / layer)
    ways = [way for way in WAYS if way not in TORCH or virtual == 1]
    steps = {way: [(theirs if way in TORCH else ours).prepared(way, each) for each in rows] for way in ways}
    found: Clocked = {way: ([], [0.0] * len(batches)) for way in ways}
    for repeat in range(asked.repeats + 1):
        turn = repeat % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            took = 0.0
            for number, step in enumerate(steps[way]):
                transport.all_reduce(torch.zeros(1))
                start = time.perf_counter()
                loss = step()
                numbers = torch.zeros(2, transport.world_size, dtype=torch.float64)
                numbers[0, transport.rank], numbers[1, transport.rank] = time.perf_counter() - start, loss
                transport.all_reduce(numbers)
                took += float(numbers[0].max())
                found[way][1][number] = float(numbers[1].sum())
            if repeat:
                found[way][0].append(took)
    return found


def clock_table(asked: Any) -> Iterator[str]:
    """Yield how long every way takes, beside ours.

    Raises:
        SystemExit: losses differ.
    """
    batches, worst = (
        [
            draw_lengths("wikipedia", asked.batch_tokens, seed, longest_tokens=asked.capacity)
            for seed in range(asked.batches)
        ],
        0.0,
    )

    def rows() -> Iterator[list[object]]:
        nonlocal worst
        for cut in CLOCKED:
            found = run_ranks(partial(clock, cut=cut, batches=batches, asked=asked), cut[0] * cut[1])[0]
            for way, (took, losses) in found.items():
                ratios = [each / ours for each, ours in zip(took, found[OURS][0], strict=True)]
                worst = max(worst, *(abs(each / ours - 1) for each, ours in zip(losses, found[OURS][1], strict=True)))
                spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
                median = f"**{statistics.median(ratios):.2f}**"
                yield [*cut, way, f"{statistics.median(took):.2f} s", median, spread]

    heads = "replicas | stages | virtual | way | all batches, median | over lengthwise: median | least, most"
    yield from markdown(heads, rows())
    yield from ("", f"Losses agree to {worst:.0e}.")
    if worst > TOLERANCE:
        raise SystemExit(f"expected the same losses to {TOLERANCE:g}, got a difference of {worst:.1e}")


def main() -> None:
    """Write the table of one part."""
    asked = parse_options(
        __doc__,
        part=["emulated", "clock"],
        slower=8.0,
        repeats=5,
        batches=2,
        batch_tokens=6144,
        capacity=2048,
    )
    before = os.getloadavg()[0]
    findings = Findings("pipeline" if asked.part == "clock" else "pipeline-emulated")
    findings.add(emulated_table(asked) if asked.part == "emulated" else clock_table(asked))
    how = "Emulated (sleeps, not work) and simulated" if asked.part == "emulated" else "Measured"
    findings.sign(how, f"no GPU; load before and after: {before:.1f}, {os.getloadavg()[0]:.1f}", asked.out)


if __name__ == "__main__":
    main()
