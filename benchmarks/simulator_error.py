"""The simulator against the truth of this machine: steps of `lengthwise train` on 2 ranks, measured and simulated.

    python benchmarks/simulator_error.py [--rounds 3] [--steps 6] [--capacity 4096]

Turn by turn, because a machine does not keep its speed:

1. Profile, with two processes at work as in training: local microbatches of several lengths and packs, sequences over
   both ranks, and the step's end; all of them once, then all again, so that a drift meets all alike; medians.
2. Train the tiny model on the Python standard library, a run of its own that the profile has not seen.
3. Profile again. The costs of a run come from the profiles before and after it, geometric means. Least squares give
   seconds a squared token, a token and a microbatch; the link's rate and latency are those with which simulated rings
   are nearest to the measured ones.
4. Simulate the plans that the run wrote, and compare every step but the first, which warms up.

Modelled: blocks of attention, linear work with norms and loss, launches, transfers of rings, the step's end. Not
modelled: the thread that plans ahead on rank 0, reading and writing of files, and a drift within a run; the drift
between profiles is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lengthwise.attention import choose_kernel
from lengthwise.cli import main as lengthwise
from lengthwise.cli.machine import machine_lines
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import Cost, Link, all_terms_cost, named_hardware, named_shape
from lengthwise.engine.optimizer import ShardedAdamW
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import build_model, find_model
from lengthwise.simulator import simulate_plan
from pages import Findings, add_out
from support import make_batch, run_ranks

SHAPE, REPEATS = named_shape("tiny"), 4
LOCAL = ((128,), (512,), (1024,), (2048,), (4096,), (256,) * 8, (700,) * 5, (3000, 500, 500))
RINGS = (256, 1024, 2048, 4096, 8192)


def main() -> None:
    """Print the profiles and the error of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--capacity", type=int, default=4096)
    add_out(parser, "simulator_error")
    arguments, findings = parser.parse_args(), Findings("simulator_error")
    print(*machine_lines()[1:], sep="\n")
    before = first = profiled()
    measured: list[float] = []
    simulated: list[float] = []
    for turn in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            truth, plans = train(Path(folder), arguments.steps, arguments.capacity)
        after = profiled()
        cost = fitted_cost(np.sqrt(before * after))
        drift = float(np.exp(np.log(after / before).mean()))
        findings.add([f"Round {turn + 1}: {cost.version}; the profile after takes {drift:.3f} x that before."])
        findings.add(["", "| step | measured s | simulated s | error % |", "|---|---|---|---|"])
        guesses = [simulate_plan(plan, cost).step_seconds for plan in plans]
        for step, (real, guess) in enumerate(zip(truth, guesses, strict=True), start=1):
            warm_up = " (warm-up, left out)" if step == 1 else ""
            findings.add([f"| {step}{warm_up} | {real:.3f} | {guess:.3f} | {100 * (guess / real - 1):+.1f} |"])
        findings.add([""])
        measured += truth[1:]
        simulated += guesses[1:]
        before = after
    errors = [abs(guess / real - 1) for real, guess in zip(measured, simulated, strict=True)]
    mean = f"{len(errors)} steps: mean absolute error {100 * statistics.mean(errors):.1f} % (aim: 10 %)"
    total = sum(simulated) / sum(measured) - 1
    drift = float(np.exp(np.log(before / first).mean()))
    findings.add([f"{mean}, median {100 * statistics.median(errors):.1f} %, all steps together {100 * total:+.1f} %."])
    findings.sign(
        "Measured, and simulated from profiles made before and after,", f"last profile {drift:.3f} x the first"
    )
    findings.write(arguments.out)


def local_plan(lengths: Sequence[int]) -> Plan:
    """The same pack on either rank."""
    first = tuple(range(len(lengths)))
    packs = (first, tuple(i + len(lengths) for i in first))
    return _plan([*lengths, *lengths], *(Piece(ranks=(rank,), sequences=pack) for rank, pack in enumerate(packs)))


def ring_plan(length: int) -> Plan:
    """One sequence over both ranks."""
    return _plan([length], Piece(ranks=(0, 1), sequences=(0,)))


def _plan(tokens: Sequence[int], *pieces: Piece) -> Plan:
    microbatches = tuple(Microbatch(pieces=(piece,)) for piece in pieces)
    return Plan(ranks=2, layers=SHAPE.layers, capacity=10**6, tokens=tuple(tokens), microbatches=microbatches)


def profiled() -> NDArray[np.float64]:
    """Measure on two ranks: seconds of `LOCAL`, of `RINGS` and of the step's end, of the slower rank."""
    return np.array(run_ranks(profile, 2)[0])


def profile(transport: Any) -> list[float]:
    """Measure as one of two ranks; all that is measured takes turns."""
    torch.set_num_threads(1)
    model: Any = build_model(find_model("tiny"), seed=0)
    flat = FlatParameters(model, transport, dtype=torch.float32)
    optimizer = ShardedAdamW(flat, OptimizerConfig(), transport)
    kernel = choose_kernel(torch.device("cpu"))

    def running(plan: Plan) -> Callable[[], object]:
        batch = make_batch(plan.tokens, vocab=SHAPE.vocab)
        return lambda: run_plan(model, plan, batch, transport, kernel, name="profile")

    runs = [running(plan) for plan in (*map(local_plan, LOCAL), *map(ring_plan, RINGS))]
    runs.append(lambda: optimizer.update(1e-4, optimizer.reduce()))
    took = [[_seconds(run, transport) for run in runs] for _ in range(REPEATS + 1)]
    return [statistics.median(column) for column in zip(*took[1:], strict=True)]


def _seconds(run: Callable[[], object], transport: Any) -> float:
    transport.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    run()
    rows = torch.zeros(transport.world_size, dtype=torch.float64)
    rows[transport.rank] = time.perf_counter() - start
    transport.all_reduce(rows)
    return float(rows.max())


def fitted_cost(seconds: NDArray[np.float64]) -> Cost:
    """Fit the costs to a profile; every measurement counts by its relative error."""
    local, rings, end_seconds = seconds[: len(LOCAL)], seconds[len(LOCAL) : -1], float(seconds[-1])
    terms = np.array([[sum(n * n for n in lengths), sum(lengths), 1.0] for lengths in LOCAL])
    fitted = np.maximum(0.0, np.linalg.lstsq(terms / local[:, None], np.ones(len(local)), rcond=None)[0])
    quadratic, linear, fixed = map(float, fitted)
    plain = replace(
        all_terms_cost(SHAPE, named_hardware("cpu")),
        quadratic_seconds=quadratic,
        linear_seconds=linear,
        fixed_seconds=fixed,
        couples_layers=True,
        block_efficiency=(),
    )
    best, nearest = plain, np.inf
    for rate, latency in product(np.geomspace(1e7, 1e10, 25), np.geomspace(1e-5, 3e-2, 25)):
        link = Link(bytes_per_second=float(rate), hop_seconds=float(latency) * SHAPE.layers)
        tried = replace(plain, near=link, far=link, reduced_bytes=2 * end_seconds * float(rate))
        guesses = [simulate_plan(ring_plan(length), tried).work_end_seconds.max() for length in RINGS]
        error = float(np.abs(np.array(guesses) / rings - 1).mean())
        if error < nearest:
            end = f"end {1e3 * end_seconds:.1f} ms"
            told = (
                f"q {quadratic:.3g}, l {linear:.3g}, g {fixed:.3g}, link {rate:.3g} B/s + {latency:.3g} s a hop, {end}"
            )
            best, nearest = replace(tried, version=f"{told}; rings fitted to {100 * error:.1f} %"), error
    return best


def train(folder: Path, steps: int, capacity: int) -> tuple[list[float], list[Plan]]:
    """Run `lengthwise train`; return each step's seconds and plan."""
    config = folder / "run.yaml"
    config.write_text(
        f"model: tiny\ndata: [{{python_stdlib: true, max_tokens: {2 * capacity}, too_long: skip}}]\nsteps: {steps}\n"
        f"global_batch: {{tokens: {6 * capacity}}}\ncapacity_tokens: {capacity}\noutput: out\n"
    )
    try:
        lengthwise(["train", str(config), "--ranks", "2"])
    except SystemExit as stopped:
        if stopped.code:
            raise
    metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    plans = [Plan.from_json(path.read_text()) for path in sorted((folder / "out/plans").glob("*.json"))]
    return [row["step_seconds"] for row in metrics], plans


if __name__ == "__main__":
    main()
