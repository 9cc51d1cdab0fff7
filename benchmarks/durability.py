"""What a run survives, and what that costs: random faults, saves beside training, ranks that are started again.

    python benchmarks/durability.py [--parts faults,saves,restarts] [--kills 300] [--stops 20] [--corruptions 2000]
        [--inputs 500] [--seed 0] [--runs 3] [--steps 18] [--ranks 1,2] [--restarts 5] [--hidden 256] [--layers 6]

`faults`: kills, stops, damages and changed bytes at random by a seed (`trials`). The seeds of failures are printed; one
of them ends with status 1.

`saves`: a Llama whose batches all have the same lengths, in fp32, one thread a rank. Runs with `background: true` and
`false` take turns. A step counts from the end of the one before to its own; it is one *with a save* where a save began
after the step before, or was still under way then. What a save costs: by how much the steps with it took longer than as
many median steps without. Two ranks on two cores leave the writer none of its own, one rank leaves it one.

`restarts`: rank 1 of two ends itself with SIGKILL in step 3, after a checkpoint of step 2, under each of the two
launchers that start ranks again. Seconds from its end to the line of step 3 in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from testing.faults import VARIABLE

import lengthwise
from lengthwise.run import checkpoints as saving
from lengthwise.run.callbacks import Callback, FinishedStep
from pages import Findings, markdown, parse_options, verdict
from trials import RANKS, STEPS, Failure, Trials, corrupt, hostile, kill, living_children, saved_runs, stop, write_run

EVERY_STEPS = 4
AIM_SHARE, AIM_SECONDS = 0.05, 20.0
LONGEST_SECONDS = 180.0  # that a killed run may take before the benchmark gives up
NUMBERS = {
    "kills": 300, "stops": 20, "corruptions": 2000, "inputs": 500, "seed": 0,
    "runs": 3, "steps": 18, "restarts": 5, "hidden": 256, "layers": 6,
}  # fmt: skip
LAUNCHERS = {
    "torchrun with `--max-restarts`": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "Lengthwise itself with `--max-restarts`": (),
}


def faults(asked: argparse.Namespace, failures: list[str]) -> Iterator[str]:
    """Yield what came of random faults, and note failures."""
    import lengthwise.run.api  # noqa: F401 - once, for all that are forked

    with tempfile.TemporaryDirectory(prefix="durability-") as folder:
        trials = Trials(Path(folder))
        saved = dict(saved_runs(trials)) if asked.corruptions else {}
        kinds: dict[str, tuple[int, Callable[[random.Random], str]]] = {
            "kill -9 of the run or a rank, at a random time": (asked.kills, lambda draw: kill(trials, draw)),
            "SIGSTOP of a rank": (asked.stops, lambda draw: stop(trials, draw)),
            "damage to one or two checkpoints": (asked.corruptions, lambda draw: corrupt(trials, draw, saved)),
            "changed bytes of run file, config or data": (asked.inputs, lambda draw: hostile(trials, draw)),
        }
        rows = []
        for what, (number, trial) in kinds.items():
            outcomes = Counter[str]()
            for each in range(number):
                try:
                    outcomes[trial(random.Random(f"{asked.seed} {what} {each}"))] += 1
                except Failure as failure:
                    outcomes["**failures**"] += 1
                    failures.append(f"{what}, seed {asked.seed}, trial {each}: {failure}")
                    print(failures[-1], file=sys.stderr, flush=True)
            told = "; ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            rows.append([what, number, told or "none", outcomes["**failures**"]])
    yield from markdown("what | trials | what came of it | failures", rows)
    if again := trials.made_again:
        yield f"\nSteps made again after a kill: {statistics.mean(again):.1f} on average, {max(again)} at most."


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run measured, on rank 0.

    with_save, without: seconds of steps. copies: of each save, seconds that the step waited for it. costs: by how much
    the steps of each save took longer, in steps. num_bytes: of a checkpoint.
    """

    with_save: list[float]
    without: list[float]
    copies: list[float]
    costs: list[float]
    num_bytes: int


class Clock(Callback):
    """Notes when each step ended and whether a save was under way then; of rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, step: FinishedStep) -> None:
        """Note it."""
        number = step.metrics.step
        newest = number // EVERY_STEPS * EVERY_STEPS  # due after this step: its save is about to begin
        begun = newest - EVERY_STEPS if newest == number else newest
        committed = self._folder / "out" / "checkpoints" / f"step-{begun:06d}"
        saves = newest == number or (begun > 0 and not committed.exists())
        _note(self._folder / "clock.jsonl", {"step": number, "end": time.perf_counter(), "saves": saves})


def _note(log: Path, row: Mapping[str, object]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _noted(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def steady_run(folder: Path, **more: Any) -> Path:
    """Write a run whose batches all have the same lengths."""
    row = [place * 7 % 256 for place in range(512)]
    common = {"capacity_tokens": 1024, "precision": "fp32", "measurements": "off"}
    return write_run(folder, [row] * 16, vocab=256, **common, **more)


def measured(ranks: int, background: bool, *, hidden: int, layers: int, steps: int) -> Run:
    """Train once, in a process of its own, and return what rank 0 measured."""
    with tempfile.TemporaryDirectory(prefix="durability-") as name:
        folder = Path(name)
        saves = {"every_steps": EVERY_STEPS, "keep_last": 2, "background": background}
        run = steady_run(folder, hidden=hidden, layers=layers, steps=steps, checkpoint=saves)
        process = multiprocessing.get_context("fork").Process(target=_train, args=(run, ranks, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"durability: a run ended with status {process.exitcode}")
        newest = max((folder / "out" / "checkpoints").glob("step-??????"))
        num_bytes = sum(each.stat().st_size for each in newest.iterdir())
        copies = [row["seconds"] for row in _noted(folder / "copies.jsonl")]
        return read_run(_noted(folder / "clock.jsonl"), copies, num_bytes)


def _train(run: Path, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    save = saving.Checkpoints.save

    def timed_save(self: saving.Checkpoints, step: int, **numbers: Any) -> None:
        start = time.perf_counter()
        save(self, step, **numbers)
        if self._transport.rank == 0:
            _note(folder / "copies.jsonl", {"seconds": time.perf_counter() - start})

    saving.Checkpoints.save = timed_save
    lengthwise.train(json.loads(run.read_text(encoding="utf-8")), ranks=ranks, callbacks=[Clock(folder)])


def read_run(clock: Sequence[Mapping[str, Any]], copies: Sequence[float], num_bytes: int) -> Run:
    """Tell steps with a save from others. The first steps, until a save was due, warm up: no number is of them."""
    warm = [row for row in clock if row["step"] >= EVERY_STEPS]
    seconds = [(before["saves"], row["end"] - before["end"]) for before, row in pairwise(warm)]
    without = [each for saved, each in seconds if not saved]
    if not without:
        raise SystemExit("durability: a save is always under way; take a smaller model")
    median, costs = statistics.median(without), list[float]()
    for place, (saved, each) in enumerate(seconds):
        if saved and warm[place]["step"] % EVERY_STEPS == 0:
            costs.append(0.0)
        if saved:
            costs[-1] += each / median - 1
    with_save = [each for saved, each in seconds if saved]
    # The last save ends the run: nothing trains beside it.
    return Run(with_save=with_save, without=without, copies=list(copies[:-1]), costs=costs, num_bytes=num_bytes)


def saves(asked: argparse.Namespace) -> Iterator[str]:
    """Yield what saves cost the steps beside them."""
    kinds = [(int(ranks), background) for ranks in asked.ranks.split(",") for background in (True, False)]
    runs: dict[tuple[int, bool], list[Run]] = {kind: [] for kind in kinds}
    for _ in range(asked.runs):
        for kind in kinds:
            runs[kind].append(measured(*kind, steps=asked.steps, hidden=asked.hidden, layers=asked.layers))

    def row(ranks: int, background: bool) -> list[object]:
        of_kind = runs[ranks, background]
        without, with_save, copies = (median_of(of_kind, name) for name in ("without", "with_save", "copies"))
        costs = [each for run in of_kind for each in run.costs]
        spread = f"{statistics.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})"
        return [ranks, str(background).lower(), f"{without:.3f}", f"{with_save:.3f}", spread, f"{copies:.3f}"]

    heads = "ranks | background | step without a save, s | with one | a save costs, steps | waits, s"
    yield from markdown(heads, (row(*kind) for kind in kinds))
    yield ""
    yield from (saves_verdict(ranks, runs[ranks, True]) for ranks, background in kinds if background)


def median_of(runs: Sequence[Run], name: str) -> float:
    """Return the median over all runs of what one of their lists holds."""
    return statistics.median(each for run in runs for each in getattr(run, name))


def saves_verdict(ranks: int, several: Sequence[Run]) -> str:
    """Say whether saves in the background keep the aim on so many ranks."""
    cost, copy = median_of(several, "costs"), median_of(several, "copies") / median_of(several, "without")
    return (
        f"Of {ranks} rank{'s' * (ranks > 1)}, in the background: {several[0].num_bytes / 1e6:.0f} MB, a save stalls "
        f"training by {cost:.1%} of a step (aim below {AIM_SHARE:.0%}: {verdict(cost < AIM_SHARE)}), {copy:.1%} while "
        "it is copied."
    )


def seconds_after_kill(launcher: Sequence[str], *, hidden: int, layers: int) -> tuple[float, float]:
    """Kill a rank; return the seconds until new ranks are there, and until the first new step has ended."""
    with tempfile.TemporaryDirectory(prefix="durability-") as name:
        folder = Path(name)
        kept = {"every_steps": 2, "background": False}
        run = steady_run(folder, hidden=hidden, layers=layers, steps=4, checkpoint=kept)
        command = [sys.executable, *launcher, *(["--max-restarts", "1"] if launcher else [])]
        command += ["-m", "lengthwise", "train", str(run)]
        command += [] if launcher else ["--ranks", "2", "--max-restarts", "1"]
        outside = {key: each for key, each in os.environ.items() if not key.startswith(("TORCHELASTIC", "RANK"))}
        environment = {**outside, "OMP_NUM_THREADS": "1", VARIABLE: "update:1:3:kill"}
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            return _watched(process, folder / "out" / "metrics.jsonl")
        except TimeoutError as error:
            told = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-500:]
            raise SystemExit(f"durability: {error}; it said: {told}") from None
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def _watched(process: subprocess.Popen[bytes], metrics: Path) -> tuple[float, float]:
    """Wait for the end of a rank, for two new ones, and for their first line of metrics."""

    def until(ready: Callable[[], object], otherwise: str) -> float:
        end = time.monotonic() + LONGEST_SECONDS
        while not ready():
            if time.monotonic() > end or process.poll() is not None:
                raise TimeoutError(otherwise)
            time.sleep(0.005)
        return time.perf_counter()

    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 1, "no step")
    ranks = set(living_children(process.pid))
    killed = until(lambda: ranks - set(living_children(process.pid)), "no rank died")
    started = until(lambda: len(set(living_children(process.pid)) - ranks) >= 2, "no new ranks")
    return started - killed, until(lambda: metrics.read_bytes().count(b"\n") >= 3, "no new step") - killed


def restarts(kills: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    """Yield a row for each launcher."""

    def row(launcher: str, seconds: Sequence[tuple[float, float]]) -> list[object]:
        new, first = (list(each) for each in zip(*seconds, strict=True))
        cells = (f"{statistics.median(new):.1f}", f"{statistics.median(first):.1f}", f"{max(first):.1f}")
        return [launcher, len(seconds), *cells, f"{AIM_SECONDS:.0f} s: {verdict(max(first) <= AIM_SECONDS)}"]

    heads = "ranks started again by | kills | to new ranks, s | to the end of the first new step, s | worst | aim"
    return markdown(heads, (row(*each) for each in kills.items()))


def main() -> None:
    """Print the tables of the parts asked for, and write each into the page if asked."""
    asked = parse_options(
        __doc__,
        parts="faults,saves,restarts",
        **NUMBERS,
        ranks=("1,2", "numbers of ranks whose saves are timed, with commas between them"),
    )
    failures, parts = list[str](), asked.parts.split(",")
    about = f"torch {torch.__version__}, medians, in brackets least and most"
    if "faults" in parts:
        findings = Findings("durability")
        findings.add(faults(asked, failures))
        told = f"seed {asked.seed}, runs of {STEPS} steps on {RANKS[0]} to {RANKS[-1]} ranks"
        findings.sign("Measured", told, asked.out)
    if "saves" in parts:
        findings, load = Findings("durability-saves"), os.getloadavg()[0]
        findings.add(saves(asked))
        loads = f"one-minute load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
        findings.sign("Measured", f"{about}; {loads}", asked.out)
    if "restarts" in parts:
        findings, kills = Findings("durability-restarts"), {launcher: [] for launcher in LAUNCHERS}
        for launcher, command in [*LAUNCHERS.items()] * asked.restarts:
            kills[launcher].append(seconds_after_kill(command, hidden=asked.hidden, layers=asked.layers))
        findings.add(restarts(kills))
        findings.sign("Measured", about, asked.out)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
