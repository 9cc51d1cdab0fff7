"""What the demo holds against a static mesh: one step of a large machine, simulated, and its own steps, measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.report.figures import count, percent, seconds

if TYPE_CHECKING:
    from lengthwise.core.plan import Plan
    from lengthwise.core.timeline import Timeline

Rows = Sequence[dict[str, Any]]
_GPUS, _CAPACITY, _STEP_TOKENS = 32, 16_384, 1 << 20
_SHOWN_RANKS = 8


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


def comparison_lines(ours: Rows, static: Rows) -> list[str]:
    """Compare the steps that both have: seconds, tokens a second, idle, and the losses."""
    steps = len(static)
    both = {"lengthwise": ours[:steps], "static": static}
    spent = {name: sum(row["step_seconds"] for row in rows) for name, rows in both.items()}
    lines = [f"{'':<12}{'seconds':>10}{'tokens/s':>10}{'idle':>9}"]
    for name, rows in both.items():
        tokens = sum(row["num_tokens"] for row in rows)
        idle = sum(row["idle_ratio"] * row["step_seconds"] for row in rows) / spent[name]
        lines.append(f"{name:<12}{seconds(spent[name]):>10}{count(tokens / spent[name]):>10}{percent(idle):>9}")
    apart = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(*both.values(), strict=True))
    ratio = spent["static"] / spent["lengthwise"]
    lines.append(
        f"static took {ratio:.2f}x as long for {steps} steps (measured, one run after the other: other work on this "
        f"machine counts too); losses agree to {apart:.0e}"
    )
    return lines


def simulated_lines(lengths: Sequence[int]) -> Iterator[str]:
    """Plan one step of a 7B model on 32 H100s from these lengths, and draw what ranks do in it under two planners."""
    from lengthwise.core.shape import Cluster
    from lengthwise.cost import all_terms_cost, named_hardware, named_shape
    from lengthwise.planner import PlanOptions, plan_step
    from lengthwise.report.ranks import KEY, rank_lines
    from lengthwise.simulator import chosen_ranks, simulate_plan

    shape = named_shape("llama-7b")
    cost = all_terms_cost(shape, named_hardware("h100"))
    cluster = Cluster(ranks=_GPUS, capacity_tokens=_CAPACITY)
    step = _first_step([each for each in lengths if each <= cluster.longest_tokens])
    found: dict[str, tuple[Plan, Timeline]] = {}
    for name in ("static", "single-degree", "lengthwise"):
        plan = plan_step(step, cluster, cost, PlanOptions(planner=name, layers=shape.layers))
        found[name] = plan, simulate_plan(plan, cost)
    took = {name: timeline.step_seconds for name, (_, timeline) in found.items()}
    yield f"{len(step)} files, {count(sum(step))} tokens, the longest {max(step)}, {_GPUS} ranks (simulated)"
    for name in ("static", "lengthwise"):
        plan, timeline = found[name]
        yield f"{name}: {seconds(took[name])}, {percent(timeline.idle_ratio)} idle"
        lines = rank_lines(plan, timeline, most_seconds=max(took.values()))
        yield from (lines[rank] for rank in chosen_ranks(timeline, _SHOWN_RANKS))
    yield KEY
    yield (
        f"static (one mesh of rings for the longest file) takes {took['static'] / took['lengthwise']:.2f}x as long as "
        f"lengthwise, the best single degree for all of the step {took['single-degree'] / took['lengthwise']:.2f}x"
    )


def _first_step(lengths: Sequence[int]) -> list[int]:
    """Take every so many-th file of the sorted ones, so that the step has all kinds of lengths, 1M tokens in all."""
    ordered = sorted(lengths)
    every = max(1, -(-sum(ordered) // _STEP_TOKENS))
    return ordered[every - 1 :: every]
