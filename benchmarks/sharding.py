"""Sharded parameters: bytes, step times beside FSDP2, and which layout models want.

    python benchmarks/sharding.py [--ranks 2] [--repeats 5] [--batches 2] [--batch-tokens 8192] [--capacity 2048]
        [--links MBYTES]
    python benchmarks/sharding.py --layouts [--gpus 8,64,512]

One small Llama in fp32 over gloo on loopback, one thread a rank; lengths of files of the standard library, cut at half
the capacity so that packed FSDP2 has packs for all ranks. All ways have the same model, batches and AdamW, and take
turns; the ratio is the median of the repeats. FSDP2 is `fully_shard` of each layer and the root, with its own prefetch,
parameters freed after forward or kept; padded microbatches are of sequences of like length with torch's sdpa, packed
ones run the same kernel and the same packed attention as ours. Losses must agree to 1e-4, or the benchmark fails.

`--links` (root, `ip` and `tc`: `namespaces`) gives every rank a network of its own behind a link of so many MB/s each
way, for all ways alike: gloo's collectives and our transfers share its socket.

`--layouts` simulates: one batch of github up to 32K, 16K tokens a GPU, h100, each layout at its best settings.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from testing import LiveBytes, run_ranks
from testing.laid import freed_parameters, whole_parameters
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig

from batches import STDLIB, tokens_batch
from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, SoloTransport, Transport
from lengthwise.config import FRESH_RATE, OptimizerConfig
from lengthwise.core.names import counted
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import (
    StepMemory,
    all_terms_cost,
    named_hardware,
    named_shape,
    shape_from_config,
    sharded_cost,
)
from lengthwise.data.recipes import draw_lengths
from lengthwise.engine.batch import StepBatch, random_batch
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import ModelSource, build_model, wrapped_layers
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.report.figures import seconds
from lengthwise.simulator import LAYOUTS, Scenario, auto_layout, compare_layouts
from namespaces import shaped_nodes
from pages import Findings, markdown, parse_options

ZERO1, ZERO3 = "zero1, free", "zero3, waves"
FSDP2 = tuple(f"FSDP2 {how}, {kept}" for how in ("packed", "padded") for kept in ("freed", "kept"))
WAYS = (ZERO3, ZERO1, *FSDP2)
MODELS = ("llama-3.2-1b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3.3-70b")
CPU, LAYERS, WORDS = torch.device("cpu"), 4, 4096
CONFIG = LlamaConfig(
    vocab_size=WORDS, hidden_size=192, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=65_536, tie_word_embeddings=False,
)  # fmt: skip
SOURCE = ModelSource(name="small llama", config=CONFIG, weights=False)
TOLERANCE, BETAS = 1e-4, (0.9, 0.95)
_DRAWN_BYTES = 60  # for a token: most files are longer than what is left of them


def main() -> None:
    """Write the tables of both, or that of layouts."""
    asked = parse_options(
        __doc__, ranks=2, repeats=5, batches=2, batch_tokens=8192, capacity=2048, layouts=False,
        links=(0.0, "MB/s of each rank's own link, shaped by tc; needs root; 0: loopback"),
        gpus=("8,64,512", "beside --layouts"),
    )  # fmt: skip
    if asked.layouts:
        findings = Findings("layouts")
        findings.add(layouts_table([int(each) for each in asked.gpus.split(",")]))
        findings.sign("Simulated", "lengths of github up to 32K, 16K tokens a GPU, seed 0", asked.out)
        return
    findings = Findings("sharding-links" if asked.links else "sharding")
    cluster = Cluster(ranks=asked.ranks, capacity_tokens=asked.capacity)
    batches = [documents(asked.batch_tokens, seed, asked.capacity // 2) for seed in range(asked.batches)]
    with shaped_nodes(asked.ranks, 1e6 * asked.links, "--links") if asked.links else nullcontext() as nodes:
        enter = None if nodes is None else nodes.enter
        work = partial(_run_rank, cluster=cluster, batches=batches, repeats=asked.repeats)
        found = run_ranks(work, asked.ranks, before_joining=enter)
    findings.add(bytes_table(found[0][1], asked.ranks))
    findings.add(["", *times_table(found[0][0])])
    links = f"; links of {asked.links:g} MB/s" if asked.links else ""
    about = f"{counted(asked.repeats, 'repeat')}, {counted(asked.batches, 'batch')}{links}"
    findings.sign("Measured", about, asked.out)


def documents(tokens: int, seed: int, longest: int) -> list[int]:
    """Draw lengths of the standard library's files, cut at `longest`, as many as have `tokens`: 2.7 bytes a token."""
    drawn = tokens_batch(STDLIB, _DRAWN_BYTES * tokens, seed, Cluster(ranks=1 << 10, capacity_tokens=1 << 20))
    cut = [max(2, min(longest, int(length / 2.7))) for length in drawn]
    return cut[: 1 + sum(total < tokens for total in accumulate(cut))]


def _run_rank(
    transport: Transport, *, cluster: Cluster, batches: Sequence[list[int]], repeats: int
) -> tuple[list[Step], list[Bytes]]:
    return _Rank(transport, cluster, batches).run(repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes a parameter of one rank: between steps with AdamW, and what a wave of a token gathers beside at most."""

    way: str
    kept: float
    kept_predicted: float
    wave: float
    wave_predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one way."""

    way: str
    repeat: int
    batch: int
    seconds: float
    loss: float


class _Rank:
    """All ways on one rank."""

    def __init__(self, transport: Transport, cluster: Cluster, batches: Sequence[list[int]]) -> None:
        torch.set_num_threads(1)
        self._transport, self._cluster = transport, cluster
        self._batches = [random_batch(lengths, vocab=WORDS) for lengths in batches]
        self._ways: dict[str, Callable[[StepBatch], float]] = {}
        self._bytes: list[Bytes] = []
        for way in WAYS:
            trainee = _Fsdp(transport, cluster, way) if way in FSDP2 else _Ours(transport, cluster, way)
            self._ways[way] = trainee.step
            self._bytes += [trainee.measured(way)] if isinstance(trainee, _Ours) else []

    def run(self, repeats: int) -> tuple[list[Step], list[Bytes]]:
        """Train every batch in every way, in turns; repeat 0 warms up and is not counted."""
        steps = []
        for repeat in range(repeats + 1):
            for number, batch in enumerate(self._batches):
                turn = (repeat + number) % len(WAYS)
                for way in (*WAYS[turn:], *WAYS[:turn]):
                    self._transport.all_reduce(torch.zeros(1))
                    start = time.perf_counter()
                    loss = self._ways[way](batch)
                    took = torch.tensor([time.perf_counter() - start, loss], dtype=torch.float64)
                    rows = torch.empty(2 * self._transport.world_size, dtype=torch.float64)
                    self._transport.all_gather(rows, took)
                    last, losses = float(rows[::2].max()), float(rows[1::2].sum())
                    steps.append(Step(way=way, repeat=repeat, batch=number, seconds=last, loss=losses))
        return steps, self._bytes


class _Ours:
    """Lengthwise, with whole or sharded parameters."""

    def __init__(self, transport: Transport, cluster: Cluster, way: str) -> None:
        self._transport, self._cluster = transport, cluster
        self._model = build_model(SOURCE, seed=0, attention=ATTENTION_NAME)
        self._sharded = way == ZERO3
        self._parameters: Any = (
            freed_parameters(
                self._model, transport, dtype=torch.float32, device=CPU, layers=wrapped_layers(self._model)
            )
            if self._sharded
            else whole_parameters(self._model, transport, dtype=torch.float32)
        )
        config = OptimizerConfig(lr=FRESH_RATE, weight_decay=0.0)
        self._optimizer = sliced_optimizer(config, self._model, self._parameters, transport.rank)
        shape = shape_from_config(CONFIG.to_dict())
        self._memory = StepMemory(
            shape=shape, dtype_bytes=4, ranks=cluster.ranks, shard="zero3" if self._sharded else "zero1", ties=False,
            parameters=sum(torch.Size(each).numel() for each in self._parameters.shapes),
        )  # fmt: skip
        cost = all_terms_cost(shape, named_hardware("cpu"))
        self._cost = sharded_cost(cost, self._memory) if self._sharded else cost
        self._options = PlanOptions(mode="waves" if self._sharded else "free", layers=LAYERS)
        self._kernel, self._plans = choose_kernel(CPU), dict[tuple[int, ...], Plan]()

    def plan(self, batch: StepBatch) -> Plan:
        lengths = tuple(batch.lengths)
        if lengths not in self._plans:  # a run plans while the step before is under way
            self._plans[lengths] = plan_step(lengths, self._cluster, self._cost, self._options)
        return self._plans[lengths]

    def step(self, batch: StepBatch) -> float:
        loss_sum = self._forward_backward(batch)
        self._optimizer.end_step(FRESH_RATE, self._transport)
        return loss_sum / batch.loss_weight

    def _forward_backward(self, batch: StepBatch) -> float:
        more = {"parameters": self._parameters} if self._sharded else {}
        plan = self.plan(batch)
        context = StepContext(self._model, Mesh(self._transport, 1), self._kernel, name="step", **more)
        return run_part(plan, batch, context).loss_sum

    def measured(self, way: str) -> Bytes:
        count = self._memory.parameters or 1
        kept = sum({id(each): each.nbytes for each in self._parameters.tensors()}.values())
        kept += sum(each.nbytes for each in self._optimizer.vectors().values())
        batch = random_batch([2] * self._cluster.ranks, vocab=WORDS)
        gc.collect()
        with LiveBytes(*self._model.parameters(), *self._parameters.tensors()) as live:
            self._forward_backward(batch)
            self._parameters.reduce_gradients()
        self._parameters.clear_gradients()
        return Bytes(
            way=way, kept=kept / count, kept_predicted=self._memory.state_bytes() / count,
            wave=live.peak_bytes / count, wave_predicted=self._memory.gathered_bytes() / count,
        )  # fmt: skip


class _Fsdp:
    """FSDP2 in lock-step: as many microbatches on every rank."""

    def __init__(self, transport: Transport, cluster: Cluster, way: str) -> None:
        self._rank, self._cluster, self._packs = transport.rank, cluster, "packed" in way
        self._model: Any = build_model(SOURCE, seed=0, attention=ATTENTION_NAME if self._packs else "sdpa")
        mesh = dist.device_mesh.init_device_mesh("cpu", (cluster.ranks,))
        for each in (*wrapped_layers(self._model), self._model):
            fully_shard(each, mesh=mesh, reshard_after_forward="freed" in way)
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=FRESH_RATE, betas=BETAS, weight_decay=0.0)
        self._kernel = choose_kernel(CPU)

    def step(self, batch: StepBatch) -> float:
        run = self._run_packed if self._packs else self._run_padded
        loss = run(batch)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss / batch.loss_weight

    def _run_packed(self, batch: StepBatch) -> float:
        """Run this rank's packs with the same attention as ours, by a plan of one rank."""
        packs = pack(batch.lengths, self._cluster)
        own = [Microbatch(pieces=(Piece(ranks=(0,), sequences=tuple(each)),)) for each in packs[self._rank]]
        plan = Plan(
            ranks=1, layers=LAYERS, capacity=self._cluster.capacity_tokens, tokens=tuple(batch.lengths),
            microbatches=tuple(own),
        )  # fmt: skip
        context = StepContext(self._model, Mesh(SoloTransport(), 1), self._kernel, name="step")
        return run_part(plan, batch, context).loss_sum

    def _run_padded(self, batch: StepBatch) -> float:
        total = 0.0
        for numbers in pad(batch.lengths, self._cluster)[self._rank]:
            rows = [batch.whole(number)[0] for number in numbers]
            longest = max(len(row) for row in rows)
            ids = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
            there = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
            logits = self._model(input_ids=ids, attention_mask=there.long(), use_cache=False).logits[:, :-1]
            labels = ids[:, 1:].masked_fill(~there[:, 1:], -100)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / batch.loss_weight).backward()
            total += float(loss.detach())
        return total


def pack(lengths: Sequence[int], cluster: Cluster) -> list[list[list[int]]]:
    """Return each rank's packs: as few as hold all, as many on each, level in tokens, like sizes side by side."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    waves = -(-sum(lengths) // (cluster.ranks * cluster.capacity_tokens))
    while True:
        packs: list[list[int]] = [[] for _ in range(waves * cluster.ranks)]
        held = [0] * len(packs)
        for number in order:
            least = held.index(min(held))
            packs[least].append(number)
            held[least] += lengths[number]
        if max(held) <= cluster.capacity_tokens:
            break
        waves += 1
    assert all(packs), f"{len(packs)} packs of {len(lengths)} sequences: raise --batch-tokens"
    by_size = [packs[place] for place in sorted(range(len(packs)), key=lambda place: -held[place])]
    return [by_size[rank :: cluster.ranks] for rank in range(cluster.ranks)]


def pad(lengths: Sequence[int], cluster: Cluster) -> list[list[list[int]]]:
    """Return each rank's microbatches of sequences of like lengths, as many on each, that fit when they are padded."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    made: list[list[int]] = []
    for number in order:
        if made and (len(made[-1]) + 1) * lengths[made[-1][0]] <= cluster.capacity_tokens:
            made[-1].append(number)
        else:
            made.append([number])
    while len(made) % cluster.ranks:
        fullest = max(made, key=len)
        assert len(fullest) > 1, "more ranks than sequences"
        made.append(fullest[len(fullest) // 2 :])
        del fullest[len(fullest) // 2 :]
    made.sort(key=lambda each: -len(each) * lengths[each[0]])
    return [made[rank :: cluster.ranks] for rank in range(cluster.ranks)]


def bytes_table(found: Sequence[Bytes], ranks: int) -> Iterator[str]:
    """Yield what a rank holds of each parameter."""
    rows = (
        [each.way, f"{each.kept:.2f}", f"{each.kept_predicted:.2f}", f"{each.wave:.2f}", f"{each.wave_predicted:.2f}"]
        for each in found
    )
    heads = f"bytes a parameter, {ranks} ranks | between steps | predicted | in a step of few tokens, besides"
    return markdown(f"{heads} | predicted, gathered alone", rows)


def times_table(steps: Sequence[Step]) -> Iterator[str]:
    """Yield how long the steps of each way take, beside those of zero3.

    Raises:
        SystemExit: losses differ.
    """
    losses: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        losses.setdefault((step.repeat, step.batch), []).append(step.loss)
    worst = max(max(each) / min(each) - 1 for each in losses.values())
    took: dict[str, dict[int, float]] = {way: {} for way in WAYS}
    for step in steps:
        if step.repeat:
            took[step.way][step.repeat] = took[step.way].get(step.repeat, 0.0) + step.seconds
    ours = took[ZERO3]

    def row(way: str) -> list[str]:
        ratios = [took[way][repeat] / ours[repeat] for repeat in ours]
        spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
        return [
            way,
            f"{statistics.median(took[way].values()):.2f} s",
            f"**{statistics.median(ratios):.2f}**",
            spread,
            last[way],
        ]

    last = {step.way: f"{step.loss:.6f}" for step in steps}
    yield from markdown("way | all batches, median | over zero3: median | least, most | last loss", map(row, WAYS))
    yield ""
    yield f"Losses agree to {worst:.0e}."
    if worst > TOLERANCE:
        raise SystemExit(f"expected the same losses to {TOLERANCE:g}, got a difference of {worst:.1e}")


def layouts_table(gpus: Sequence[int]) -> Iterator[str]:
    """Yield the layouts of each model on so many GPUs, by what a step takes beside the best."""

    def rows() -> Iterator[list[str]]:
        for model in MODELS:
            for devices in gpus:
                scenario = Scenario(shape=named_shape(model), hardware=named_hardware("h100"), devices=devices)
                tokens = draw_lengths("github", 16_384 * devices, 0, longest_tokens=32_768)
                layouts = compare_layouts([tokens], scenario)
                found = dict(zip(LAYOUTS, layouts, strict=False))
                times = [row.found.mean_seconds for row in layouts if row.found]
                cells = [_layout_cell(found.get(layout), min(times, default=0.0)) for layout in LAYOUTS]
                yield [model, f"{devices}", auto_layout([tokens], scenario, layouts) or "none", *cells]

    return markdown("model | GPUs | `auto` | zero1 | zero3 | hybrid", rows())


def _layout_cell(row: Any, best: float) -> str:
    if row is None:
        return "as zero3"
    if (found := row.found) is None:
        return "does not fit"
    recompute = found.steps[0].recompute
    again = {"layer": "all", "all_but_attention": "MLP", "elementwise": "norms", "none": ""}.get(recompute, recompute)
    said = f", recompute {again}" if again else ""
    ratio = found.mean_seconds / best
    took = f"**{seconds(found.mean_seconds)}**" if ratio == 1 else f"{ratio:.2f}x"
    return f"{took}, {found.held_tokens[recompute] // 1024}K tokens{said}"


if __name__ == "__main__":
    main()
