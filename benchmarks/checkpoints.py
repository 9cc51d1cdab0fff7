"""What a checkpoint costs a step, and how long after a kill a run makes its next step.

    python benchmarks/checkpoints.py [--runs 3] [--steps 18] [--kills 5] [--hidden 256] [--layers 6] [--ranks 1,2]

A Llama whose batches all have the same lengths, in fp32, one thread a rank. Runs with `background: true` and `false`
take turns. A step counts from the end of the one before to its own; it is one *with a save* where a save began after
the step before, or was still under way then. What a save costs: by how much the steps with it took longer than as many
median steps without. Two ranks on two cores leave the writer none of its own, one rank leaves it one.

A kill: rank 1 of two ends itself with SIGKILL in step 3, after a checkpoint of step 2, under each of the two launchers
that start ranks again. Seconds from its end to the line of step 3 in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import lengthwise
from lengthwise.core.faults import VARIABLE
from lengthwise.training import checkpoints as saving
from lengthwise.training.callbacks import Callback
from lengthwise.training.metrics import FinishedStep
from pages import Findings, add_out

EVERY_STEPS = 4
AIM_SHARE, AIM_SECONDS = 0.05, 20.0
LONGEST_SECONDS = 180.0  # that a killed run may take before the benchmark gives up
LAUNCHERS = {
    "torchrun with `--max-restarts`": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "Lengthwise itself with `--max-restarts`": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run measured, on rank 0.

    with_save, without: seconds of steps. copies, writes, cpu: of each save, seconds that the step waited for it, that
    its thread wrote, and of these on a core. costs: by how much the steps of each save took longer, in steps.
    num_bytes: of a checkpoint.
    """

    with_save: list[float]
    without: list[float]
    copies: list[float]
    writes: list[float]
    cpu: list[float]
    costs: list[float]
    num_bytes: int


class Clock(Callback):
    """Notes when each step ended and whether a save was under way then; of rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "clock.jsonl"

    def on_step(self, step: FinishedStep) -> None:
        """Note it."""
        number = step.metrics.step
        newest = number // EVERY_STEPS * EVERY_STEPS  # due after this step: its save is about to begin
        begun = newest - EVERY_STEPS if newest == number else newest
        saves = newest == number or (begun > 0 and not _checkpoint(self._folder / "out", begun).exists())
        row = {"step": number, "end": time.perf_counter(), "saves": saves}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _checkpoint(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:06d}"


def values(folder: Path, *, hidden: int, layers: int, steps: int) -> dict[str, Any]:
    """Write a model's config and its data; return the values of a run of them."""
    model = folder / "model"
    model.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    row = json.dumps({"input_ids": [place * 7 % 256 for place in range(512)]})
    (folder / "train.jsonl").write_text(f"{row}\n" * 16, encoding="utf-8")
    return {
        "model": str(model), "weights": "fresh", "data": [{"path": str(folder / "train.jsonl")}], "steps": steps,
        "global_batch": {"sequences": 4}, "capacity_tokens": 1024, "precision": "fp32", "device": "cpu",
        "measurements": "off", "output": str(folder / "out"),
    }  # fmt: skip


def measured(ranks: int, background: bool, *, hidden: int, layers: int, steps: int) -> Run:
    """Train once, in a process of its own, and return what rank 0 measured."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        folder = Path(name)
        run = values(folder, hidden=hidden, layers=layers, steps=steps)
        run["checkpoint"] = {"every_steps": EVERY_STEPS, "keep_last": 2, "background": background}
        process = multiprocessing.get_context("fork").Process(target=_train, args=(run, ranks, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"checkpoints: a run ended with status {process.exitcode}")
        num_bytes = sum(each.stat().st_size for each in _newest(folder / "out").iterdir())
        return read_run(_rows(folder / "clock.jsonl"), _rows(folder / "saves.jsonl"), num_bytes)


def _newest(output: Path) -> Path:
    return max((output / "checkpoints").glob("step-??????"))


def _train(run: dict[str, Any], ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    _time_calls(folder / "saves.jsonl")
    lengthwise.train(run, ranks=ranks, callbacks=[Clock(folder)])


def _time_calls(log: Path) -> None:
    """Write how long rank 0 takes for each save on the thread that trains, and on the one that writes."""
    save, write_part = saving.Checkpoints.save, saving.write_part  # pyright: ignore[reportPrivateImportUsage]

    def timed_save(self: saving.Checkpoints, step: int, **numbers: Any) -> None:
        with _timed(log, "copy", is_first=self._transport.rank == 0):
            save(self, step, **numbers)

    def timed_write(folder: Path, rank: int, state: Mapping[str, torch.Tensor]) -> None:
        with _timed(log, "write", is_first=rank == 0):
            write_part(folder, rank, state)

    saving.Checkpoints.save, saving.write_part = timed_save, timed_write  # pyright: ignore[reportPrivateImportUsage]


@contextlib.contextmanager
def _timed(log: Path, what: str, *, is_first: bool) -> Iterator[None]:
    start, cpu = time.perf_counter(), time.thread_time()
    yield
    row = {"what": what, "seconds": time.perf_counter() - start, "cpu": time.thread_time() - cpu}
    if is_first:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_run(clock: Sequence[Mapping[str, Any]], saves: Sequence[Mapping[str, Any]], num_bytes: int) -> Run:
    """Tell steps with a save from others. The first steps, until a save was due, warm up: no number is of them."""
    warm = [row for row in clock if row["step"] >= EVERY_STEPS]
    seconds = [(before["saves"], row["end"] - before["end"]) for before, row in pairwise(warm)]
    without = [each for saved, each in seconds if not saved]
    if not without:
        raise SystemExit("checkpoints: a save is always under way; take a smaller model")
    median, costs = statistics.median(without), list[float]()
    for place, (saved, each) in enumerate(seconds):
        if saved and warm[place]["step"] % EVERY_STEPS == 0:
            costs.append(0.0)
        if saved:
            costs[-1] += each / median - 1
    # The last save ends the run: nothing trains beside it.
    copies, writes = ([row for row in saves if row["what"] == what][:-1] for what in ("copy", "write"))
    with_save = [each for saved, each in seconds if saved]
    return Run(
        with_save=with_save,
        without=without,
        copies=[row["seconds"] for row in copies],
        writes=[row["seconds"] for row in writes],
        cpu=[row["cpu"] for row in writes],
        costs=costs,
        num_bytes=num_bytes,
    )


def table(runs: Mapping[tuple[int, bool], Sequence[Run]]) -> Iterator[str]:
    """Yield a row for each kind of run."""
    head = "| ranks | background | step without a save, s | with one | ratio | a save costs, steps"
    yield f"{head} | waits, s | writes, s | on a core, s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (ranks, background), several in runs.items():
        without, with_save, costs, copies, writes, cpu = (
            [each for run in several for each in getattr(run, name)]
            for name in ("without", "with_save", "costs", "copies", "writes", "cpu")
        )
        ratios = [statistics.median(run.with_save) / statistics.median(run.without) for run in several]
        cells = [ranks, str(background).lower(), f"{statistics.median(without):.3f}"]
        cells += [f"{statistics.median(with_save):.3f}", f"{_spread(ratios)}", _spread(costs)]
        cells += [f"{statistics.median(each):.3f}" for each in (copies, writes, cpu)]
        yield f"| {' | '.join(map(str, cells))} |"


def _spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def verdict(ranks: int, several: Sequence[Run]) -> str:
    """Say whether saves in the background keep the aim on so many ranks, and how fast they write."""
    cost = statistics.median(each for run in several for each in run.costs)
    step = statistics.median(each for run in several for each in run.without)
    copy, cpu = (
        statistics.median(each for run in several for each in getattr(run, name)) / step for name in ("copies", "cpu")
    )
    num_bytes = several[0].num_bytes
    speed = num_bytes / ranks / statistics.median(each for run in several for each in run.writes)
    met = "met" if cost < AIM_SHARE else "**missed**"
    return (
        f"Of {ranks} rank{'s' * (ranks > 1)}, in the background: {num_bytes / 1e6:.0f} MB, a save stalls training by "
        f"{cost:.1%} of a step (aim below {AIM_SHARE:.0%}: {met}), {copy:.1%} while it is copied; its thread works "
        f"{cpu:.1%} of a step on a core; a rank writes, syncs and digests {speed / 1e6:.0f} MB/s."
    )


def seconds_after_kill(launcher: Sequence[str], *, hidden: int, layers: int) -> tuple[float, float]:
    """Kill a rank; return the seconds until new ranks are there, and until the first new step has ended."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        folder = Path(name)
        run = values(folder, hidden=hidden, layers=layers, steps=4)
        run["checkpoint"] = {"every_steps": 2, "background": False}
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
        command = [sys.executable, *launcher, *(["--max-restarts", "1"] if launcher else [])]
        command += ["-m", "lengthwise", "train", str(folder / "run.json")]
        command += [] if launcher else ["--ranks", "2", "--max-restarts", "1"]
        outside = {key: each for key, each in os.environ.items() if not key.startswith(("TORCHELASTIC", "RANK"))}
        environment = {**outside, "OMP_NUM_THREADS": "1", VARIABLE: "update:1:3:kill"}
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            return _watched(process, folder / "out" / "metrics.jsonl")
        except TimeoutError as error:
            told = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-500:]
            raise SystemExit(f"checkpoints: {error}; it said: {told}") from None
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def _watched(process: subprocess.Popen[bytes], metrics: Path) -> tuple[float, float]:
    """Wait for the end of a rank, for two new ones, and for their first line of metrics."""
    ranks = set[int]()
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 1, "no step", process)
    ranks |= living_children(process.pid)
    until(lambda: ranks - living_children(process.pid), "no rank died", process)
    killed = time.perf_counter()
    until(lambda: len(living_children(process.pid) - ranks) >= 2, "no new ranks", process)
    started = time.perf_counter()
    until(lambda: metrics.read_bytes().count(b"\n") >= 3, "no new step", process)
    return started - killed, time.perf_counter() - killed


def until(ready: Any, otherwise: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for something.

    Raises:
        TimeoutError: it did not come, or the process ended before.
    """
    end = time.monotonic() + LONGEST_SECONDS
    while not ready():
        if time.monotonic() > end or process.poll() is not None:
            raise TimeoutError(otherwise)
        time.sleep(0.005)


def living_children(pid: int) -> set[int]:
    """Return the children of a process's first thread that have not ended."""
    alive = set[int]()
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    alive.add(int(child))
    return alive


def restarts(kills: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    """Yield a row for each launcher."""
    yield "| ranks started again by | kills | to new ranks, s | to the end of the first new step, s | worst | aim |"
    yield "|---|---|---|---|---|---|"
    for launcher, seconds in kills.items():
        new, first = (list(each) for each in zip(*seconds, strict=True))
        aim = f"{AIM_SECONDS:.0f} s: {'met' if max(first) <= AIM_SECONDS else '**missed**'}"
        cells = (len(seconds), f"{statistics.median(new):.1f}", f"{statistics.median(first):.1f}", f"{max(first):.1f}")
        yield f"| {launcher} | {' | '.join(map(str, cells))} | {aim} |"


def main() -> None:
    """Print both tables, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("runs", 3), ("steps", 18), ("kills", 5), ("hidden", 256), ("layers", 6)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, with commas between them")
    add_out(parser, "checkpoints")
    asked = parser.parse_args()
    findings, before = Findings("checkpoints"), os.getloadavg()[0]
    size = {"hidden": asked.hidden, "layers": asked.layers}
    kinds = [(int(ranks), background) for ranks in asked.ranks.split(",") for background in (True, False)]
    runs: dict[tuple[int, bool], list[Run]] = {kind: [] for kind in kinds}
    for _ in range(asked.runs):
        for kind in kinds:
            runs[kind].append(measured(*kind, steps=asked.steps, **size))
    if asked.runs:
        findings.add([*table(runs), ""])
        findings.add(verdict(ranks, several) for (ranks, background), several in runs.items() if background)
    kills: dict[str, list[tuple[float, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for _ in range(asked.kills):
        for launcher, command in LAUNCHERS.items():
            kills[launcher].append(seconds_after_kill(command, **size))
    if asked.kills:
        findings.add(["", *restarts(kills)])
    loads = f"one-minute load average {before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
    findings.sign("Measured", f"torch {torch.__version__}, medians, in brackets least and most; {loads}")
    findings.write(asked.out)


if __name__ == "__main__":
    main()
