"""What the demo compares: one step on 8 GPUs, simulated, and the losses of its steps with those of a static mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lengthwise.core.names import counted
from lengthwise.report.figures import count, seconds

Rows = Sequence[dict[str, Any]]
_MODEL, _GPUS, _STEP_TOKENS, _LONGEST = "qwen3-8b", 8, 1 << 20, 128 * 1024


def train_static(run_file: Path, steps: int, *, ranks: int) -> Path:
    """Train the first steps again with the planner `static`; return that run's folder.

    Raises:
        KeyboardInterrupt: a signal ended it early.
    """
    from lengthwise.run.api import train

    overrides = ["planner=static", "output=static", f"steps={steps}"]
    result = train(run_file, ranks=ranks, overrides=overrides, timeout_seconds=100)
    if result.stopped_by is not None:
        raise KeyboardInterrupt
    return result.folder


def read_metrics(folder: Path) -> Rows:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def comparison_line(ours: Rows, static: Rows) -> str:
    """Say how far the losses of the steps that both have are apart: a plan changes no result.

    What a plan saves is left to the simulation, which has every method on its best mesh: this static mesh is untuned.
    """
    pairs = list(zip(ours, static, strict=False))
    apart = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    return f"losses of {counted(len(pairs), 'step')} agree to {apart:.0e}: plans change the time, not the result"


def simulated_lines(lengths: Sequence[int]) -> Iterator[str]:
    """Simulate one step of an 8B model on 8 H100s from these lengths, as `lengthwise simulate` does; draw its GPUs."""
    from lengthwise.cost import named_hardware, named_shape
    from lengthwise.report.answer import answer_notes, answer_sentence, answer_table
    from lengthwise.report.ranks import KEY, gpu_lines
    from lengthwise.simulator import Question, answer

    step = _first_step([each for each in lengths if each <= _LONGEST])
    found = answer([step], Question(shape=named_shape(_MODEL), hardware=named_hardware("h100"), devices=_GPUS))
    yield f"{_MODEL}, {len(step)} files, {count(sum(step))} tokens, the longest {max(step)}"
    yield answer_sentence(found)
    yield answer_table(found)
    yield from answer_notes(found)
    shown = [row for row in (found.best_other, found.ours) if row is not None and row.step_seconds]
    most = max(row.step_seconds[0] for row in shown)
    for row in shown:
        yield f"{row.name}: {seconds(row.step_seconds[0])}"
        yield from gpu_lines(row, range(_GPUS), most_seconds=most)
    yield KEY


def _first_step(lengths: Sequence[int]) -> list[int]:
    """Take every so many-th file of the sorted ones, so that the step has all kinds of lengths, 1M tokens in all."""
    ordered = sorted(lengths)
    every = max(1, -(-sum(ordered) // _STEP_TOKENS))
    return ordered[every - 1 :: every]
