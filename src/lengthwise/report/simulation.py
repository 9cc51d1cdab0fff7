"""A simulation as a table for the terminal, as JSON for tools, and as one plain sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lengthwise.core.names import counted
from lengthwise.report.figures import count, percent, seconds
from lengthwise.report.tables import ColumnTable
from lengthwise.simulator import PlannerResult

SCHEMA = "lengthwise.simulation/1"
COLUMNS = (
    "planner", "step time", "speed-up", "of ideal", "median", "slowest", "tokens/s", "MFU", "idle", "exposed", "memory",
)  # fmt: skip


def result_rows(results: Sequence[PlannerResult]) -> list[tuple[str, ...]]:
    """Write one row a planner, in the order of `COLUMNS`; speed-ups are over the first planner."""
    return [
        (
            each.planner,
            seconds(each.mean_seconds),
            f"{results[0].mean_seconds / each.mean_seconds:.2f}x",
            percent(each.ideal_ratio),
            seconds(each.percentile_seconds(50)),
            seconds(each.percentile_seconds(100)),
            count(each.tokens_per_second),
            percent(each.flops_ratio),
            percent(each.mean("idle_ratio")),
            percent(each.mean("exposed_ratio")),
            _gigabytes(most_memory_bytes(each)),
        )
        for each in results
    ]


def simulation_table(results: Sequence[PlannerResult], *, title: str) -> ColumnTable:
    """Compare planners, one column each."""
    return ColumnTable(rows=list(zip(COLUMNS, *result_rows(results), strict=True)), title=title)


def simulation_json(
    results: Sequence[PlannerResult], facts: dict[str, Any], chosen: Sequence[PlannerResult] = ()
) -> dict[str, Any]:
    """Write all figures, those of single batches too; ratios are of all ranks' time, times in seconds.

    `chosen`: as for `closing_sentence`.
    """
    return {
        "schema": SCHEMA,
        **facts,
        "chosen_seconds": {each.planner: each.mean_seconds for each in chosen},
        "planners": {
            each.planner: {
                "step_seconds": [step.step_seconds for step in each.steps],
                "loader_seconds": [step.loader_seconds for step in each.steps],
                "mean_seconds": each.mean_seconds,
                "p50_seconds": each.percentile_seconds(50),
                "p99_seconds": each.percentile_seconds(99),
                "bound_seconds": [step.bound_seconds for step in each.steps],
                "tokens_per_second": each.tokens_per_second,
                "mfu": each.flops_ratio,
                "compute_ratio": each.mean("compute_ratio"),
                "idle_ratio": each.mean("idle_ratio"),
                "exposed_ratio": each.mean("exposed_ratio"),
                "memory_bytes": most_memory_bytes(each),
                "recompute": [step.recompute for step in each.steps],
                "speedup_over_first": results[0].mean_seconds / each.mean_seconds,
                "ideal_ratio": each.ideal_ratio,
            }
            for each in results
        },
    }


def most_memory_bytes(result: PlannerResult) -> float:
    """Return the bytes of the fullest device in the fullest batch."""
    return max(step.memory_bytes for step in result.steps)


def remarks(results: Sequence[PlannerResult], *, device_bytes: float, chose_recompute: bool) -> list[str]:
    """Say what the table does not: who needs more memory than a device has, and which recomputation was chosen."""
    said = []
    if chose_recompute:
        kinds = [f"{each.planner} {_kinds(each)}" for each in results]
        said.append(f"recomputation chosen: {', '.join(kinds)}")
    full = [each.planner for each in results if most_memory_bytes(each) > device_bytes]
    if full:
        said.append(
            f"more memory than the {_gigabytes(device_bytes)} that a device has: {', '.join(full)}; "
            "lower --capacity, or use more devices a rank (--tp, --pp)"
        )
    return said


def _kinds(result: PlannerResult) -> str:
    """List kinds of recomputation, with the number of batches where there are several."""
    batches = Counter(step.recompute for step in result.steps)
    return " and ".join(
        f"{kind} ({counted(number, 'batch')})" if len(batches) > 1 else kind for kind, number in batches.items()
    )


def _gigabytes(quantity_bytes: float) -> str:
    return f"{quantity_bytes / 1e9:.1f} GB"


def closing_sentence(
    results: Sequence[PlannerResult], mesh: str, *, chosen: Sequence[PlannerResult] = (), unit: str = "tokens"
) -> str:
    """Say in one sentence or two what a step takes with the first planner, and what the last one saves at least.

    `mesh`: all devices, and how many of them make a rank: no other was compared. `chosen`: the first and the last
    planner again, on the first batch, heads and recomputation chosen for both; the smaller saving is claimed. `unit`:
    what lengths were counted in.
    """
    first, last = results[0], results[-1]
    step = f"{seconds(first.mean_seconds)} with {first.planner}, {percent(first.ideal_ratio)} of the ideal"
    caveat = f"simulated, not measured{'; lengths in bytes, not tokens' * (unit == 'bytes')}"
    if len(results) == 1:
        return f"On {mesh} a step takes {step} ({caveat})."
    ratio = first.mean_seconds / last.mean_seconds
    also = ""
    if chosen:
        again, ours = (each.mean_seconds for each in chosen)
        ratio = min(ratio, again / ours)
        also = f"; with heads and recomputation chosen for both, {seconds(again)} and {seconds(ours)} (first batch)"
    least = " at least" * bool(chosen)
    return (
        f"On {mesh} a step takes {step}, and {seconds(last.mean_seconds)} with {last.planner}{also}. On this mesh, the "
        f"only one compared, the same training needs {_saved(ratio, least)} ({caveat})."
    )


def _saved(ratio: float, least: str) -> str:
    """Say what a step that is `ratio` times as fast saves."""
    if f"{ratio:.2f}" == "1.00":
        return "as many GPU hours, to half a percent"
    if ratio > 1:
        return f"{least} {percent(1 - 1 / ratio)} fewer GPU hours".strip()
    return f"{percent(1 / ratio - 1)} more GPU hours"
