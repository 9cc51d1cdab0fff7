"""A simulation as tables for the terminal, as JSON for tools, and as plain sentences.

A planner has two entries where they differ: its best mesh that this engine runs, then the best of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.core.names import counted
from lengthwise.report.figures import count, percent, seconds
from lengthwise.report.tables import ColumnTable
from lengthwise.simulator import MODEL_ERROR, Best, Found, Gain, PlannerResult, gain_over, gain_text

SCHEMA = "lengthwise.simulation/1"
OURS = "lengthwise"
COLUMNS = (
    "planner", "step time", "over best other", "of ideal", "median", "slowest", "tokens/s", "MFU", "idle", "exposed",
    "memory", "devices a rank", "ranks a ring", "heads split", "recomputes", "offloads", "tokens a rank",
    "trains today",
)  # fmt: skip
MOST_MFU = 0.75  # of a device's peak: no training has been published above it


def result_rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Write one row a planner, in the order of `COLUMNS`."""
    return [
        (
            each.planner,
            seconds(each.result.mean_seconds),
            gain_text(_gain(_best_other(each, found), each)) if len(found) > 1 else "no other",
            percent(each.result.ideal_ratio),
            seconds(each.result.percentile_seconds(50)),
            seconds(each.result.percentile_seconds(100)),
            count(each.result.tokens_per_second),
            mfu_text(each.result.flops_ratio),
            percent(each.result.mean("idle_ratio")),
            percent(each.result.mean("exposed_ratio")),
            _gigabytes(most_memory_bytes(each.result)),
            *_mesh_cells(each),
            "yes" if each.trains else "no",
        )
        for each in found
    ]


def _best_other(found: Found, among: Sequence[Found]) -> Found:
    """Return the shortest steps of the others; of one alone, its own."""
    return min((each for each in among if each is not found), key=lambda each: each.result.mean_seconds, default=found)


def mfu_text(ratio: float) -> str:
    """Write a share of the peak, with a flag where no machine is known to reach it."""
    return f"{percent(ratio)}{' (above what is known to be reached)' * (ratio > MOST_MFU)}"


def _mesh_cells(found: Found) -> tuple[str, ...]:
    """Format the devices of a rank, then the most that any plan uses of the rest."""
    steps, mesh = found.result.steps, found.mesh
    degree = max(step.most_degree for step in steps)
    heads, offload = max(step.most_heads for step in steps), max(step.most_offload for step in steps)
    return (
        f"TP {mesh.tensor}, PP {mesh.cut.stages}" if mesh.devices > 1 else "1",
        f"up to {degree:,}" if degree > 1 else "1",
        f"up to {heads}" if heads > 1 else "no",
        _kinds(found.result),
        f"up to {percent(offload)}" if offload else "no",
        " and ".join(f"{tokens:,}" for tokens in found.held_tokens.values()),
    )


def mesh_text(found: Found) -> str:
    """Say in a few words which mesh a planner took, and what it used on it."""
    devices, ring, heads, recompute, offload, tokens = _mesh_cells(found)
    rings = f"rings of {ring}" if ring != "1" else "no sequence cut"
    words = [devices if found.mesh.devices > 1 else "one GPU a rank", rings, f"{tokens} tokens a rank"]
    words += [f"heads split over {heads}"] * (heads != "no")
    words += [f"{recompute} computed again"] * (recompute != "none")
    words += [f"{offload} offloaded"] * (offload != "no")
    return ", ".join(words)


def simulation_table(found: Sequence[Found], *, title: str) -> ColumnTable:
    """Compare planners, one column each."""
    return ColumnTable(rows=list(zip(COLUMNS, *result_rows(found), strict=True)), title=title)


def tables_of(found: Sequence[Best]) -> list[tuple[str, list[Found]]]:
    """Group planners as the engine runs them, then, where that is another, on the best mesh of each; with titles."""
    today = [each.today for each in found if each.today is not None]
    tables = [("one step, mean of batches, as this version trains it (simulated, not measured)", today)]
    if any(each.only_planned for each in found):
        planned = [each.any_mesh for each in found if each.any_mesh is not None]
        whole = "the same on the best of all meshes tried, which this version does not all train"
        alone = "one step, mean of batches, planned only: this version trains none of it (simulated, not measured)"
        tables.append((whole if today else alone, planned))
    return [(title, each) for title, each in tables if each]


def simulation_tables(found: Sequence[Best]) -> list[ColumnTable]:
    """Write `tables_of` for a terminal."""
    return [simulation_table(each, title=title) for title, each in tables_of(found)]


def simulation_json(found: Sequence[Best], facts: dict[str, Any]) -> dict[str, Any]:
    """Write all figures, those of single batches too; ratios are of all ranks' time, times in seconds.

    planners: on the best mesh of each; trained_today: on the best that the engine of this version runs.
    """
    planned = [each.any_mesh for each in found if each.any_mesh is not None]
    today = [each.today for each in found if each.today is not None]
    return {
        "schema": SCHEMA,
        **facts,
        "plans_tried": {each.planner: each.tried for each in found},
        "refused": {each.planner: str(each.refusal) for each in found if each.any_mesh is None},
        "planners": {each.planner: _figures(each, _best_other(each, planned)) for each in planned},
        "trained_today": {each.planner: _figures(each, _best_other(each, today)) for each in today},
    }


def _figures(found: Found, best_other: Found) -> dict[str, Any]:
    result, mesh = found.result, found.mesh
    return {
        "tensor": mesh.tensor,
        "stages": mesh.cut.stages,
        "heads": mesh.heads,
        "offload": mesh.offload,
        "capacities_tokens": dict(found.setting.capacities or {}),
        "trains_today": found.trains,
        "most_degree": [step.most_degree for step in result.steps],
        "most_heads": [step.most_heads for step in result.steps],
        "most_offload": [step.most_offload for step in result.steps],
        "step_seconds": [step.step_seconds for step in result.steps],
        "loader_seconds": [step.loader_seconds for step in result.steps],
        "mean_seconds": result.mean_seconds,
        "p50_seconds": result.percentile_seconds(50),
        "p99_seconds": result.percentile_seconds(99),
        "bound_seconds": [step.bound_seconds for step in result.steps],
        "tokens_per_second": result.tokens_per_second,
        "mfu": result.flops_ratio,
        "compute_ratio": result.mean("compute_ratio"),
        "idle_ratio": result.mean("idle_ratio"),
        "exposed_ratio": result.mean("exposed_ratio"),
        "memory_bytes": most_memory_bytes(result),
        "recompute": [step.recompute for step in result.steps],
        "speedup_over_best_other": best_other.result.mean_seconds / result.mean_seconds,
        "ideal_ratio": result.ideal_ratio,
    }


def most_memory_bytes(result: PlannerResult) -> float:
    """Return the bytes of the fullest device in the fullest batch."""
    return max(step.memory_bytes for step in result.steps)


def remarks(
    found: Sequence[Best], *, device_bytes: float, names: Mapping[str, str], may_train: bool = True
) -> list[str]:
    """Say who needs more memory than a device has, and who has no mesh; `names`: as of `LengthwiseError.render`."""
    said = []
    full = [
        each.planner
        for each in found
        if any(most_memory_bytes(one.result) > device_bytes for one in (each.today, each.any_mesh) if one)
    ]
    if full:
        said.append(
            f"more memory than the {_gigabytes(device_bytes)} that a device has: {', '.join(full)}; "
            "lower --capacity, or use more devices a rank (--tp, --pp)"
        )
    if not may_train:
        said.append("planned only: this version trains without tensor parallelism (--tp)")
    for each in found:
        if each.any_mesh is None or (each.today is None and may_train):
            none = "no mesh" if each.any_mesh is None else "no mesh that this version trains"
            refusal = each.refusal if each.any_mesh is None else each.refusal_today
            why = f" ({refusal.render(names)})" if refusal else ""
            said.append(f"{each.planner}: {none} holds these sequences{why}")
    return said


def _kinds(result: PlannerResult) -> str:
    batches = Counter(step.recompute for step in result.steps)
    return " and ".join(
        f"{kind} ({counted(number, 'batch')})" if len(batches) > 1 else kind for kind, number in batches.items()
    )


def _gigabytes(quantity_bytes: float) -> str:
    return f"{quantity_bytes / 1e9:.1f} GB"


def shown_of(found: Sequence[Best]) -> list[Found]:
    """Return the plans to look at: of our planner what it trains today, of all others their best, ours last."""
    name = _our_name(found)
    others = [each.any_mesh for each in found if each.planner != name]
    ours = [_ours(each) for each in found if each.planner == name]
    return [each for each in (*others, *ours) if each is not None]


def _our_name(found: Sequence[Best]) -> str:
    names = [each.planner for each in found if each.any_mesh is not None]
    return OURS if OURS in names else names[-1]


def _ours(best: Best) -> Found | None:
    return best.today or best.any_mesh


def closing_sentences(
    found: Sequence[Best],
    devices: str,
    *,
    one_mesh: bool = False,
    not_compared: Sequence[str] = (),
    unit: str = "tokens",
) -> str:
    """Say what a step takes with our planner (or the last), as it trains today, and what it saves over the best other.

    Args:
        found: by planner.
        devices: how many of what.
        one_mesh: whether all planners were given one mesh.
        not_compared: planners of the usual comparison that were left out of this one.
        unit: what lengths were counted in.
    """
    name = _our_name(found)
    best = next(each for each in found if each.planner == name)
    ours = _ours(best)
    assert ours is not None, f"{name} was chosen because it has a mesh"
    caveat = f"Simulated, not measured{'; lengths in bytes, not tokens' * (unit == 'bytes')}."
    runs = "which this version trains" if ours.trains else "planned only: this version does not train it"
    step = f"On {devices} a step takes {seconds(ours.result.mean_seconds)} with {name}"
    step += f" ({mesh_text(ours)}; {runs}), {percent(ours.result.ideal_ratio)} of the ideal"
    others = [each.any_mesh for each in found if each.planner != name and each.any_mesh is not None]
    if not others:
        return f"{step}. {caveat}"
    other = min(others, key=lambda each: each.result.mean_seconds)
    gain = _gain(other, ours)
    what = f"{seconds(other.result.mean_seconds)} with {other.planner}, the best other plan ({mesh_text(other)})"
    only = " All planners used one mesh; another mesh may be better for either planner." * one_mesh
    only += f" Not compared: {', '.join(not_compared)}; they may be better than {other.planner}." * bool(not_compared)
    also = _planned_sentence(best, ours, other)
    return f"{step}, and {what}. {_verdict(name, other.planner, gain)}{also}{only} {caveat}"


def _gain(other: Found, ours: Found) -> Gain:
    pair = ([step.step_seconds for step in each.result.steps] for each in (other, ours))
    return gain_over(*pair)


def _verdict(name: str, other: str, gain: Gain) -> str:
    of_batches = f"the spread of {gain.batches} batches" if gain.batches > 1 else "the unknown spread of one batch"
    error = f"{gain.low:.2f}x to {gain.high:.2f}x with an error of {percent(MODEL_ERROR)} of the model and {of_batches}"
    if gain.is_equal:
        return f"That is {gain.ratio:.2f}x ({error}): no gain beyond the error."
    if gain.ratio < 1:
        return f"{name} does not help here: {other} needs {percent(1 - gain.ratio)} fewer GPU hours ({error})."
    saved = f"{percent(1 - 1 / gain.ratio)} fewer GPU hours"
    return f"The same training needs {saved} ({gain.ratio:.2f}x; {error})."


def _planned_sentence(best: Best, ours: Found, other: Found) -> str:
    """Say what our planner would gain on a mesh that cannot be trained yet, if above the error."""
    planned = best.only_planned
    if planned is None or planned is ours or _gain(ours, planned).is_equal:
        return ""
    gain = _gain(other, planned)
    time = f"{seconds(planned.result.mean_seconds)} with {best.planner} ({mesh_text(planned)})"
    return f" Planned only, not trained by this version: {time}, {gain_text(gain)} over that plan."
