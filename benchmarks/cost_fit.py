"""How well fitted costs predict what they were not fitted to: held-out microbatches and planned steps on 2 ranks.

    python benchmarks/cost_fit.py [--model tiny] [--seconds 150] [--clock cpu] [--steps 4] [--capacity 1024]

1. Two processes run what `lengthwise profile` runs, and in the same turns what is held out: lengths and packs that the
   profile has not, rings, a ring with a pack beside it, and steps that `lengthwise` plans for documents of the Python
   standard library. So a drift of the machine meets both alike.
2. The profile's samples alone are fitted.
3. The held-out runs are simulated with the fit (`simulate_plan`).

By `--clock cpu` seconds are those in which a rank computes or waits for messages: on a machine that does other work at
the same time. Aim: a mean error of 5 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from testing import run_ranks

from lengthwise.cli.machine import machine_lines
from lengthwise.comm import World
from lengthwise.config import DataSource
from lengthwise.core.measurements import Fit, Sample
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster, ModelShape
from lengthwise.cost import Cost, shape_from_config
from lengthwise.cost.fit import fit_samples, with_terms
from lengthwise.cost.measured import base_cost
from lengthwise.data import load_dataset, load_tokenizer
from lengthwise.models import find_model
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.profiler.profile import ProfileSettings, RankProfiler, build
from lengthwise.profiler.runs import Run, local_run
from lengthwise.simulator import simulate_plan
from pages import Findings, add_out

RANKS = 2
LOCAL = ((90,), (400,), (750,), (1500,), (333, 77, 50), (200,) * 5, (900, 300))
RINGS = ((200,), (700,), (1500,), (3000,), (1100, 400), (130,) * 12, (40,) * 40)


def main() -> None:
    """Print the error of every held-out run, and of all together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=1024)
    add_out(parser, "cost_fit")
    arguments, findings = parser.parse_args(), Findings("cost_fit")
    print(*machine_lines()[1:], sep="\n")
    source = find_model(arguments.model, weights="fresh")
    shape = shape_from_config(source.config.to_dict(), name=arguments.model)
    base = base_cost(shape, "cpu", precision="fp32", ranks_per_node=RANKS)
    held_out = held_out_runs(shape, base, arguments.steps, arguments.capacity)
    settings = ProfileSettings(
        seconds=arguments.seconds, longest_tokens=2048, precision="fp32", clock=arguments.clock, hardware="cpu"
    )

    def profiled(transport: Any) -> tuple[list[Sample], list[Sample]]:
        torch.set_num_threads(1)
        world = World(rank=transport.rank, world_size=RANKS, local_size=RANKS)
        rank = RankProfiler(*build(source, world, transport, "fp32"), shape, world, transport, settings)
        runs = rank.ladder()
        samples = rank.time_in_turns([*runs, *(run for _, run in held_out)])
        return samples[: len(runs)] + samples[len(runs) + len(held_out) :], samples[len(runs) :][: len(held_out)]

    samples, measured = run_ranks(profiled, RANKS, timeout_seconds=600.0)[0]
    fit = fit_samples(samples, base)
    cost = with_terms(_with_curve(base, fit), fit.terms)
    report(findings, held_out, measured, cost)
    repeats = min(each.repeats for each in samples)
    spread = statistics.median(each.spread for each in measured)
    findings.add([f"The fit itself: {100 * fit.mean_error:.1f} % on its own {len(samples)} samples."])
    findings.sign(
        "Measured, and simulated from samples taken in the same turns,",
        f"{repeats} turns, quartiles {100 * spread:.0f} % apart, clock {arguments.clock}",
    )
    findings.write(arguments.out)


def report(findings: Findings, held_out: Sequence[tuple[str, Run]], measured: Sequence[Sample], cost: Cost) -> None:
    """Add a line a run, and the errors of each kind and of all."""
    findings.add(["| held out | measured ms | simulated ms | error % |", "|---|---|---|---|"])
    errors: dict[str, list[float]] = {}
    for (name, run), sample in zip(held_out, measured, strict=True):
        assert run.plan is not None, name
        guess = float(simulate_plan(run.plan, cost).work_end_seconds.max())
        error = guess / sample.seconds - 1
        errors.setdefault(name.partition(" ")[0], []).append(abs(error))
        row = f"| {name} | {1e3 * sample.seconds:.1f} | {1e3 * guess:.1f} | {100 * error:+.1f} |"
        findings.add([row])
    every = [error for each in errors.values() for error in each]
    parts = ", ".join(f"{kind} {100 * statistics.mean(each):.1f} %" for kind, each in errors.items())
    findings.add(
        [
            "",
            f"{len(every)} held-out runs: mean absolute error {100 * statistics.mean(every):.1f} % (aim: 5 %), median "
            f"{100 * statistics.median(every):.1f} %, worst {100 * max(every):.1f} %; {parts}.",
        ]
    )


def held_out_runs(shape: ModelShape, base: Cost, steps: int, capacity: int) -> list[tuple[str, Run]]:
    """Name the runs that nothing is fitted to."""
    found = [(f"packs {_lengths(lengths)}", local_run(lengths, RANKS, shape.layers)) for lengths in LOCAL]
    for lengths in RINGS:
        piece = Piece(ranks=(0, 1), sequences=tuple(range(len(lengths))))
        found.append((f"rings {_lengths(lengths)} over 2", _ring(shape, lengths, piece)))
    beside = (Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1,)))
    found.append(("rings 1500 over 2, 300 beside it", _ring(shape, (1500, 300), *beside)))
    for number, lengths in enumerate(documents(steps, capacity)):
        cluster = Cluster(ranks=RANKS, capacity_tokens=capacity)
        plan = plan_step(lengths, cluster, base, PlanOptions(layers=shape.layers))
        name = f"steps {number + 1}: {len(lengths)} documents, {sum(lengths)} tokens"
        found.append((name, Run(kind="ring", degree=RANKS, lengths=tuple(lengths), tier="near", plan=plan)))
    return found


def documents(steps: int, capacity: int) -> list[list[int]]:
    """Draw batches of documents that two ranks can hold, longest first drawn at random; no other planner saw them."""
    source = DataSource.model_validate({"python_stdlib": True, "max_tokens": 2 * capacity, "too_long": "skip"})
    dataset = load_dataset([source], tokenizer=lambda: load_tokenizer("bytes"), vocab_size=None)
    lengths, random = dataset.lengths[dataset.ids], np.random.default_rng(0)
    batches = []
    for _ in range(steps):
        batch: list[int] = []
        while sum(batch) < 3 * capacity:
            batch.append(int(random.choice(lengths)))
        batches.append(batch)
    return batches


def _ring(shape: ModelShape, lengths: Sequence[int], *pieces: Piece) -> Run:
    microbatches = (Microbatch(pieces=pieces),)
    plan = Plan(ranks=RANKS, layers=shape.layers, capacity=10**9, tokens=tuple(lengths), microbatches=microbatches)
    return Run(kind="ring", degree=RANKS, lengths=tuple(lengths), tier="near", plan=plan)


def _with_curve(base: Cost, fit: Fit) -> Cost:
    return replace(base, block_efficiency=fit.block_efficiency or base.block_efficiency)


def _lengths(lengths: Sequence[int]) -> str:
    same = len(set(lengths)) == 1 and len(lengths) > 1
    return f"{len(lengths)} x {lengths[0]}" if same else ", ".join(map(str, lengths))


if __name__ == "__main__":
    main()
