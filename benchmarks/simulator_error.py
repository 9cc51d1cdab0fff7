"""A forecast by the simulator: steps of `lengthwise train` on 2 ranks, simulated from a profile made before the run.

    python benchmarks/simulator_error.py [--rounds 3] [--steps 6] [--capacity 4096] [--seconds 40]

Each round, in this order:

1. `lengthwise profile` measures the tiny model on 2 ranks for --seconds and fits its costs. Nothing is measured later,
   and nothing is fitted to a run.
2. `lengthwise train` trains it on files of the Python standard library; none has a length that the profile ran, which
   is asserted.
3. The plans that the run wrote are simulated with the costs of 1, and every step but the first, which warms up, is
   compared. The error is simulated over measured, less 1; all rounds count.

Modelled: blocks of attention, linear work with norms and loss, launches, transfers of rings, the step's end. Not
modelled: the process that plans ahead beside rank 0, reading and writing of files, and whatever else the machine does;
its one-minute load averages are printed. Aim: a mean absolute error of 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from lengthwise.cli import main as lengthwise
from lengthwise.cli.machine import machine_lines
from lengthwise.core.measurements import Measurements
from lengthwise.core.plan import Plan
from lengthwise.core.plan_file import read_plan_text
from lengthwise.cost.measured import measured_cost
from lengthwise.profiler.profile import ProfileSettings
from lengthwise.simulator import simulate_plan
from lengthwise.training.profiling import profile_model
from pages import Findings, add_out

RANKS = 2
AIM = 0.10


def main() -> None:
    """Print measured beside simulated seconds of every step, and the error of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each profile, about")
    add_out(parser, "simulator_error")
    arguments, findings = parser.parse_args(), Findings("simulator_error")
    print(*machine_lines()[1:], sep="\n")
    findings.add(["| round | step | measured, s | forecast, s | error |", "|---" * 5 + "|"])
    measured: list[float] = []
    forecast: list[float] = []
    loads = [os.getloadavg()[0]]
    for number in range(1, arguments.rounds + 1):
        found = profiled(arguments.seconds, 2 * arguments.capacity)
        loads.append(os.getloadavg()[0])
        with tempfile.TemporaryDirectory() as folder:
            truth, plans = train(Path(folder), arguments.steps, arguments.capacity, lengths_of(found))
        loads.append(os.getloadavg()[0])
        guesses = forecast_seconds(plans, found)
        for step, (real, guess) in enumerate(zip(truth, guesses, strict=True), start=1):
            name = f"{step} (warm-up, left out)" if step == 1 else str(step)
            findings.add([f"| {number} | {name} | {real:.3f} | {guess:.3f} | {100 * (guess / real - 1):+.1f} % |"])
        measured += truth[1:]
        forecast += guesses[1:]
    findings.add(["", summary(measured, forecast)])
    shown = ", ".join(f"{load:.1f}" for load in loads)
    findings.sign("Measured, and simulated from profiles made before,", f"load before, between and after: {shown}")
    findings.write(arguments.out)


def summary(measured: Sequence[float], forecast: Sequence[float]) -> str:
    """Say the errors of single steps and of all of them together."""
    errors = [guess / real - 1 for real, guess in zip(measured, forecast, strict=True)]
    mean = statistics.mean(abs(error) for error in errors)
    return (
        f"{len(errors)} steps: mean absolute error {100 * mean:.1f} % (aim: {100 * AIM:g} %, "
        f"{'met' if mean <= AIM else '**missed**'}), median {100 * statistics.median(map(abs, errors)):.1f} %, single "
        f"steps {100 * min(errors):+.1f} to {100 * max(errors):+.1f} %, all steps together "
        f"{100 * (sum(forecast) / sum(measured) - 1):+.1f} %."
    )


def profiled(seconds: float, longest_tokens: int) -> Measurements:
    """Measure as `lengthwise profile` does."""
    settings = ProfileSettings(
        seconds=seconds, longest_tokens=longest_tokens, precision="fp32", clock="wall", hardware="cpu"
    )
    found = profile_model("tiny", settings, ranks=RANKS, device="cpu")
    assert found is not None, "only torchrun's ranks after the first get nothing"
    return found


def lengths_of(found: Measurements) -> frozenset[int]:
    """Return every length that a profile ran."""
    return frozenset(length for sample in found.samples for length in sample.lengths)


def forecast_seconds(plans: Sequence[Plan], found: Measurements) -> list[float]:
    """Simulate steps with the costs of a profile that saw none of their lengths."""
    seen = lengths_of(found)
    for plan in plans:
        assert not seen & set(plan.tokens), f"the profile ran lengths {sorted(seen & set(plan.tokens))} of the run"
    cost = measured_cost(found)
    return [simulate_plan(plan, cost).step_seconds for plan in plans]


def write_documents(path: Path, most_tokens: int, left_out: Collection[int]) -> None:
    """Write files of the standard library as JSONL, of at most so many bytes and none of the lengths left out."""
    root = Path(os.__file__).parent
    with path.open("w", encoding="utf-8") as file:
        for each in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
            text = each.read_bytes().decode("utf-8", errors="replace")
            tokens = len(text.encode())
            if 0 < tokens <= most_tokens and tokens not in left_out:
                file.write(json.dumps({"text": text}) + "\n")


def train(folder: Path, steps: int, capacity: int, left_out: Collection[int]) -> tuple[list[float], list[Plan]]:
    """Run `lengthwise train` on documents of other lengths; return each step's seconds and plan."""
    write_documents(folder / "documents.jsonl", 2 * capacity, left_out)
    config = folder / "run.yaml"
    config.write_text(
        f"model: tiny\ndata: [{{path: documents.jsonl}}]\nsteps: {steps}\nmeasurements: 'off'\n"
        f"global_batch: {{tokens: {6 * capacity}}}\ncapacity_tokens: {capacity}\noutput: out\n"
    )
    try:
        lengthwise(["train", str(config), "--ranks", str(RANKS)])
    except SystemExit as stopped:
        if stopped.code:
            raise
    metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    plans = [Plan.from_json(read_plan_text(path)) for path in sorted((folder / "out/plans").iterdir())]
    return [row["step_seconds"] for row in metrics], plans


if __name__ == "__main__":
    main()
