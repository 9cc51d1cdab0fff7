"""What a step costs on a GPU: Lengthwise against plain Hugging Face loops with the same model, forward and backward.

    python benchmarks/gpu_step.py [--repeats 7] [--batches 2] [--out docs/gpu.md]

A Llama of 300M parameters over bytes in bf16, standard library files up to 32,768 bytes. Three loops of one process are
interleaved, the figure is the median:
    packed      documents packed to the capacity, position ids, use_cache=False, Hugging Face's sdpa
    one by one  one document at a time, Hugging Face's sdpa
    lengthwise  the plan of one rank, through the engine's own path
Then the same batches on two ranks that share the GPU, through host memory: this shows that it runs, not that it is
fast. Each part has a process of its own, because one that has started CUDA cannot fork ranks. Without a GPU nothing is
measured or written, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lengthwise.attention import choose_kernel
from lengthwise.cli.machine import machine_lines, prepare_environment
from lengthwise.comm import World, count_gpus, join
from lengthwise.config import build_config
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model, largest_head_dim, plain_attention
from lengthwise.models.load import tiny_config
from lengthwise.report.figures import count
from lengthwise.training.job import Job, prepare_job
from lengthwise.training.launch import launch
from overhead import interleaved_seconds, plain_one_by_one, plain_packed

CAPACITY, BATCH_TOKENS = 32_768, 131_072
MARK = "<!-- what follows is written by benchmarks/gpu_step.py -->\n"


def model_source() -> ModelSource:
    """A Llama of 300M parameters over bytes."""
    config = tiny_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 4096, 20
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 16, 8, 64
    return ModelSource(name="llama-300m", config=config, weights=False)


def make_job(ranks: int) -> Job:
    """The job of the benchmark; its data is the standard library's."""
    settings = {
        "model": "tiny",
        "data": [{"python_stdlib": True, "max_tokens": CAPACITY, "too_long": "skip"}],
        "global_batch": {"tokens": BATCH_TOKENS},
        "capacity_tokens": CAPACITY,
        "precision": "bf16",
        "output": "unused",
    }
    job = prepare_job(build_config(settings, folder=Path.cwd()), ranks=ranks, timeout_seconds=300, gpus=1)
    return dataclasses.replace(job, model=model_source())


def first_batches(job: Job, number: int) -> list[StepBatch]:
    """The first batches of the run."""
    return [batch for batch, _ in zip(job.batches(), range(number), strict=False)]


def measure_alone(repeats: int, number: int) -> dict[str, Any]:
    """Interleave the three loops on one GPU; return median seconds, peak bytes, and the kernel."""
    job, source, device, said = make_job(1), model_source(), torch.device("cuda", 0), list[str]()
    batches = first_batches(job, number)
    plain = build_model(source, seed=0, attention=plain_attention(source)).to(device)
    ours = build_model(source, seed=0).to(device)
    transport = join(World(rank=0, world_size=1, gpus=1), timeout_seconds=300)
    for model in (plain, ours):  # the same gradient buffers for all, so that only the loop differs
        FlatParameters(model, transport, dtype=torch.bfloat16)
    kernel = choose_kernel(device, dtype=torch.bfloat16, head_dim=largest_head_dim(source.config), say=said.append)
    plans = [job.make_plan(batch.lengths) for batch in batches]
    packs = [[piece.sequences for m in plan.microbatches for piece in m.pieces] for plan in plans]
    loops = {
        "packed": lambda: [plain_packed(plain, b, p) for b, p in zip(batches, packs, strict=True)],
        "one by one": lambda: [plain_one_by_one(plain, b) for b in batches],
        "lengthwise": lambda: [
            run_plan(ours, p, b, transport, kernel, name="benchmark") for b, p in zip(batches, plans, strict=True)
        ],
    }
    peaks = {}
    for name, run in loops.items():
        torch.cuda.reset_peak_memory_stats()
        run()
        peaks[name] = torch.cuda.max_memory_allocated()
    seconds = interleaved_seconds(loops, repeats, finish=torch.cuda.synchronize)
    return {
        "gpu": torch.cuda.get_device_name(),
        "said": said,
        "parameters": sum(parameter.numel() for parameter in ours.parameters()),
        "tokens": sum(sum(batch.lengths) for batch in batches),
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "peaks": peaks,
    }


def measure_shared(repeats: int, number: int) -> dict[str, Any]:
    """Run the same batches on two ranks that share the GPU; return what rank 0 saw."""
    job = make_job(2)
    batches = first_batches(job, number)
    plans = [job.make_plan(batch.lengths) for batch in batches]

    def work(world: World, on_phase: Any) -> dict[str, Any]:
        said: list[str] = []
        transport = join(world, timeout_seconds=300, on_phase=on_phase, say=said.append)
        model = build_model(job.model, seed=0).to(world.device)
        FlatParameters(model, transport, dtype=torch.bfloat16)
        kernel = choose_kernel(world.device, dtype=torch.bfloat16, head_dim=64)
        seconds = []
        for _ in range(repeats + 1):  # the first one warms up
            transport.all_reduce(torch.zeros(1))
            start = time.perf_counter()
            for batch, plan in zip(batches, plans, strict=True):
                run_plan(model, plan, batch, transport, kernel, name="benchmark")
            transport.all_reduce(torch.zeros(1))
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated()
        transport.close()
        return {"said": said, "seconds": statistics.median(seconds[1:]), "peak": peak}

    found: dict[str, Any] = launch(work, 2, gpus=1)
    tokens = sum(sum(batch.lengths) for batch in batches)
    return {**found, "tokens": tokens, "ring_tokens": sum(plan.ring_tokens for plan in plans)}


def in_a_process(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one part in a fresh process."""
    command = [sys.executable, __file__, "--part", part, "--repeats", str(arguments.repeats)]
    done = subprocess.run([*command, "--batches", str(arguments.batches)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"gpu_step: the part {part} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def table(alone: dict[str, Any], shared: dict[str, Any], repeats: int) -> str:
    """Write what was measured, with its date and machine."""
    rows = [
        f"| {name} | {seconds:.3f} s | {alone['tokens'] / seconds:,.0f} | {count(alone['peaks'][name])}B |"
        for name, seconds in alone["seconds"].items()
    ]
    rows.append(
        f"| lengthwise, 2 ranks on one GPU | {shared['seconds']:.3f} s | {shared['tokens'] / shared['seconds']:,.0f} "
        f"| {count(shared['peak'])}B a rank |"
    )
    best = min(alone["seconds"][name] for name in ("packed", "one by one"))
    return "\n".join(
        [
            f"## Measured on {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {alone['gpu']}",
            *(line.replace("[bold]", "").replace("[/bold]", "") for line in machine_lines()[1:]),
            "",
            f"A Llama of {count(alone['parameters'])} parameters in bf16, {alone['tokens']:,} tokens in files up to "
            f"{CAPACITY:,}, forward and backward, median of {repeats} interleaved repeats.",
            *alone["said"],
            *shared["said"],
            f"{shared['ring_tokens']:,} of the {shared['tokens']:,} tokens on two ranks were in rings.",
            "",
            "| loop | time | tokens/s | peak memory |",
            "|---|---|---|---|",
            *rows,
            "",
            f"lengthwise / the faster plain loop = {alone['seconds']['lengthwise'] / best:.3f} in time.",
            "",
        ]
    )


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description="a step on a GPU, against plain Hugging Face")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("alone", "shared"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prepare_environment()
    if not count_gpus():
        print("gpu_step: no GPU that torch can use on this machine; nothing was measured or written", file=sys.stderr)
        raise SystemExit(2)
    if arguments.part:
        measure = measure_alone if arguments.part == "alone" else measure_shared
        print(json.dumps(measure(arguments.repeats, arguments.batches)))
        return
    text = table(in_a_process("alone", arguments), in_a_process("shared", arguments), arguments.repeats)
    print(text)
    if arguments.out is not None:
        before, mark, _ = arguments.out.read_text(encoding="utf-8").partition(MARK)
        if not mark:
            raise SystemExit(f"{arguments.out}: expected the line {MARK.strip()}; nothing was written")
        arguments.out.write_text(f"{before}{mark}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
