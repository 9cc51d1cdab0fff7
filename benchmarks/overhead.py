"""What being general costs: one rank of Lengthwise against the faster of two plain Hugging Face loops.

    python benchmarks/overhead.py [--repeats 5] [--batches 3] [--models tiny,25m] [--without-packed]

Forward and backward over the same global batches of standard library files up to 8,192 bytes, in fp32, in one process:
    packed      documents packed to the capacity, position ids, use_cache=False: Hugging Face makes the block mask
    one by one  one document at a time
    lengthwise  the plan of one rank, through the engine's own path (collate, planned attention, flat gradients)
Repeats are interleaved, so that a noisy machine is noisy for all three; the figure is the ratio of medians. The packed
loop takes minutes where the model is large; `--without-packed` leaves it out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from lengthwise.attention import choose_kernel
from lengthwise.cli.machine import machine_lines
from lengthwise.comm import SoloTransport
from lengthwise.config import build_config
from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model, plain_attention
from lengthwise.models.load import tiny_config
from lengthwise.training.job import Job, prepare_job
from pages import Findings, add_out

CAPACITY = 8192
LOOPS = ("packed", "one by one", "lengthwise")


def model_source(name: str) -> ModelSource:
    """`tiny`, or a Llama of 25M parameters over bytes."""
    config = tiny_config()
    if name == "25m":
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1536, 8
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 64
    elif name != "tiny":
        raise SystemExit(f"--models: expected tiny or 25m; got {name}")
    return ModelSource(name=name, config=config, weights=False)


def plain_one_by_one(model: torch.nn.Module, batch: StepBatch) -> None:
    """The loop of a careful user: one document a forward, no padding."""
    device = next(model.parameters()).device
    for index in range(len(batch.ids)):
        ids = batch.whole(index)[0].to(device)
        model(
            input_ids=ids[None], labels=ids[None], use_cache=False, num_items_in_batch=batch.loss_tokens
        ).loss.backward()


def plain_packed(model: torch.nn.Module, batch: StepBatch, packs: Sequence[Sequence[int]]) -> None:
    """Documents packed as `packs` says, kept apart by position ids."""
    device = next(model.parameters()).device
    for pack in packs:
        ids = torch.cat([batch.whole(index)[0] for index in pack]).to(device)
        positions = torch.cat([torch.arange(batch.lengths[index]) for index in pack]).to(device)
        labels = torch.cat([batch.whole(index)[1] for index in pack]).to(device)
        model(
            input_ids=ids[None],
            position_ids=positions[None],
            labels=ids[None],
            shift_labels=labels[None],
            use_cache=False,
            num_items_in_batch=batch.loss_tokens,
        ).loss.backward()


def interleaved_seconds(
    loops: Mapping[str, Callable[[], object]], repeats: int, *, finish: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Time each loop `repeats` times, in turns; `finish` waits for what a loop has only posted."""
    seconds: dict[str, list[float]] = {loop: [] for loop in loops}
    for repeat in range(repeats + 1):
        names = list(loops)
        first = repeat % len(names)  # each goes first in turn: what ran before it is not always the same
        for loop, run in ((name, loops[name]) for name in names[first:] + names[:first]):
            finish()
            start = time.perf_counter()
            run()
            finish()
            if repeat:  # the first round warms up
                seconds[loop].append(time.perf_counter() - start)
    return seconds


def measure(name: str, job: Job, batches: Sequence[StepBatch], repeats: int, *, packed: bool) -> str:
    """Return the row of a model: median seconds of all three, and the ratio."""
    source = model_source(name)
    plain = build_model(source, seed=0, attention=plain_attention(source))
    ours = build_model(source, seed=0)
    transport, kernel = SoloTransport(), choose_kernel(torch.device("cpu"))
    for model in (plain, ours):  # the same gradient buffers for all, so that only the loop differs
        FlatParameters(model, transport, dtype=torch.float32)
    plans = [job.make_plan(batch.lengths) for batch in batches]

    def packs_of(plan: Plan) -> list[tuple[int, ...]]:
        return [piece.sequences for microbatch in plan.microbatches for piece in microbatch.pieces]

    loops: dict[str, Callable[[], object]] = {
        "packed": lambda: [plain_packed(plain, b, packs_of(p)) for b, p in zip(batches, plans, strict=True)],
        "one by one": lambda: [plain_one_by_one(plain, b) for b in batches],
        "lengthwise": lambda: [
            run_plan(ours, p, b, transport, kernel, name="benchmark") for b, p in zip(batches, plans, strict=True)
        ],
    }
    if not packed:
        del loops["packed"]
    seconds = interleaved_seconds(loops, repeats)
    medians = {loop: statistics.median(each) for loop, each in seconds.items()}
    best = min((loop for loop in loops if loop != "lengthwise"), key=lambda loop: medians[loop])
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    cells = " | ".join(f"{medians[loop]:.3f} s" if loop in medians else "-" for loop in LOOPS)
    return f"| {name} ({parameters / 1e6:.1f}M) | {cells} | {medians['lengthwise'] / medians[best]:.3f} ({best}) |"


def main() -> None:
    """Measure every model asked for."""
    parser = argparse.ArgumentParser(description="the cost of being general, on one rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--models", default="tiny,25m")
    parser.add_argument("--without-packed", action="store_true")
    add_out(parser, "overhead")
    arguments = parser.parse_args()
    print("\n".join(machine_lines()[1:]))
    config = build_config(
        {
            "model": "tiny",
            "data": [{"python_stdlib": True, "max_tokens": CAPACITY, "too_long": "skip"}],
            "global_batch": {"tokens": 16_384},
            "capacity_tokens": CAPACITY,
            "output": "unused",
        },
        folder=Path.cwd(),
    )
    job = prepare_job(config, ranks=1, timeout_seconds=60)
    batches = [batch for batch, _ in zip(job.batches(), range(arguments.batches), strict=False)]
    findings = Findings("overhead")
    findings.add([f"| model | {' | '.join(LOOPS)} | lengthwise / the faster other |", "|---" * (2 + len(LOOPS)) + "|"])
    packed = not arguments.without_packed
    findings.add(measure(name, job, batches, arguments.repeats, packed=packed) for name in arguments.models.split(","))
    tokens = sum(sum(batch.lengths) for batch in batches)
    findings.sign("Measured", f"{len(batches)} batches, {tokens:,} tokens, median of {arguments.repeats} repeats")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
