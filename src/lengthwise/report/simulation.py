"""A comparison as text: the answer in one sentence and seven rows, planners in detail, and all figures as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.core.names import counted
from lengthwise.core.plan import kinds_by_layer
from lengthwise.report.branches import branches_json, branches_notes
from lengthwise.report.figures import count, percent, seconds
from lengthwise.report.tables import ColumnTable
from lengthwise.simulator import LAYOUTS, MODEL_ERROR, OURS, POWERS, Best, Comparison, Found, Gain, gain_over
from lengthwise.simulator.rivals import BY_WORK, PADDED_RINGS

SCHEMA = "lengthwise.simulation/1"
OUR_PLANNER = "lengthwise"
MOST_MFU = 0.75  # of a device's peak: no published training exceeds it
_TOO_HIGH = " (above what is known to be reached)"
DETAILS_TITLE = "one step, mean of batches, each planner on its best mesh (simulated, not measured)"
HEADS = ("", "step", "ratio", "memory", "settings")
COLUMNS = (
    "planner", "step time", "over best other", "of ideal", "median", "slowest", "tokens/s", "MFU", "idle", "exposed",
    "memory", "stages", "ranks a ring", "heads split", "recomputes", "offloads", "tokens a rank",
)  # fmt: skip
_NAME, _STEP, _RATIO, _MEMORY = 21, 9, 7, 7  # columns of the answer's table; settings have the rest
_MOST = 80
_KERNELS = {
    "cudnn": "cuDNN (documents from 4K, rings from 16K a GPU) and FlashAttention-2 (shorter ones)",
    "flash2": "FlashAttention-2",
    "flash3": "FlashAttention-3",
}
_AGAIN = {"none": "", "layer": "all", "all_but_attention": "MLP", "elementwise": "norms"}


def answer_sentence(comparison: Comparison, unit: str = "tokens") -> str:
    """Return a sentence on a step with Lengthwise and with the best other, if they differ. unit: unit of lengths."""
    scenario, batches, other = comparison.scenario, comparison.batches, comparison.best_other
    tokens, longest = round(sum(map(sum, batches)) / len(batches)), tokens_text(comparison.longest)
    where = f"{scenario.devices} x {scenario.hardware.name}, {tokens_text(tokens)} "
    where += f"{'bytes' if unit == 'bytes' else 'tokens'} a step, longest sequence {longest}"
    ours, theirs = comparison.ours.found, None if other is None else other.found
    if ours is None:
        if theirs is None:
            return f"{where}: no method here can hold these sequences; the table gives the reasons."
        took = f"{theirs.planner} takes {seconds(theirs.mean_seconds)}"
        return f"{where}: Lengthwise cannot hold these sequences; {took}."
    took = f"{where}: {seconds(ours.mean_seconds)} with {OURS}{' and `offload`' * (not comparison.auto)}"
    if theirs is None:
        return f"{took}; FSDP2 cannot hold these sequences here."
    gain = _gain(theirs, ours)
    best = f"the best otherwise takes {seconds(theirs.mean_seconds)} ({theirs.planner})"
    powers, also = comparison.powers and comparison.powers.found, ""
    if powers is not None:
        by_rule = _gain(powers, ours)
        also = f"; {POWERS}: {'equal' if by_rule.is_equal else f'{by_rule.ratio:.2f}x'}"
    ratios = gain.ratio, *comparison.kernels.values()
    if max(ratios) > (1 + MODEL_ERROR) * min(ratios):
        return f"{took}; {best}: {min(ratios):.2f} to {max(ratios):.2f}x as long, by the attention kernel{also}."
    if gain.is_equal:
        return f"{took}; {best}: equal within the model's {100 * MODEL_ERROR:.0f} %{also}."
    if gain.ratio > 1:
        return f"{took}; {best}: {gain.ratio:.2f}x as long{also}."
    return f"{took}; {best}: no gain, Lengthwise takes {1 / gain.ratio:.2f}x as long{also}."


def tokens_text(tokens: int) -> str:
    """Return a number of tokens near a round binary one as that one: 1M, 64K; others in three digits."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size:
            value = tokens / size
            return f"{value:.0f}{unit}" if abs(value - round(value)) < 0.02 * value else f"{value:.1f}{unit}"
    return str(tokens)


def answer_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return one row of `HEADS` for each way to train; one that does not fit has its name and the reason."""
    ours, rows = comparison.ours.found, list[tuple[str, ...]]()
    for row in comparison.rows:
        if (found := row.found) is None:
            assert row.refusal is not None, "what has no mesh was refused one"
            rows.append((row.planner, f"does not fit: {row.refusal.got}"))
            continue
        ratio = f"{found.mean_seconds / ours.mean_seconds:.2f}x" if ours else ""
        memory = f"{found.most('memory_bytes') / 1e9:.0f} GB"
        rows.append((row.planner, seconds(found.mean_seconds), ratio, memory, settings_text(found)))
    return rows


def answer_table(comparison: Comparison) -> str:
    """Return the table, at most 80 columns wide."""
    lines = []
    for name, *cells in (HEADS, *answer_rows(comparison)):
        if len(cells) == 1:
            line = f"{name:<{_NAME}}{cells[0]}"
            line = line if len(line) <= _MOST else line.replace("longest sequence", "longest")
        else:
            step, ratio, memory, settings = cells
            line = f"{name:<{_NAME}}{step:>{_STEP}}{ratio:>{_RATIO}}{memory:>{_MEMORY}}  {settings}".rstrip()
        lines.append(line)
    return "\n".join(lines)


def _settings(found: Found) -> dict[str, Any]:
    """Return the settings of a way to train; None for what does not concern it."""
    how, kind = found.mesh.lock_step, found.steps[0].recompute
    return {
        "recompute": kind,
        "capacity_tokens": found.held_tokens[kind],
        "size": how and how.size,
        "by_length": how.by_length if how and how.size else None,
        "degree": how.degree if how and (how.degree > 1 or not how.size) else None,
        "sorted": how is not None and how.by_work,
        "layout": None if how else found.mesh.layout,
        "offloads": _offloads(found),
    }


def _offloads(found: Found) -> bool:
    return found.most("most_offload") > 0


def settings_text(found: Found) -> str:
    """Return the settings of a way to train in a few words."""
    how, kind = found.mesh.lock_step, found.steps[0].recompute
    if how is None:
        first = found.mesh.layout
    elif how.size is not None:
        where = f"ring of {how.degree}" if how.degree > 1 else "GPU"
        first = f"{how.size} a {where}{', by length' * how.by_length}"
    else:
        packs = f"packs of {count(found.held_tokens[kind])}"
        first = f"rings of {how.degree}" if how.degree > 1 else packs
    return ", ".join([first, *_again(kind), *(["offload"] * _offloads(found))])


def _again(recompute: str) -> list[str]:
    mix = kinds_by_layer(recompute)
    some = f"{_AGAIN[mix.stronger]} in {mix.number}" * bool(mix.number)  # of the layers
    words = [each for each in (_AGAIN[mix.kind], some) if each]
    return [f"recompute {', '.join(words)}"] if words else []


def answer_notes(comparison: Comparison) -> list[str]:
    """Return notes on what the figures are, and on what they leave open."""
    scenario, layouts = comparison.scenario, comparison.layouts
    kernel = "" if scenario.cost else _KERNELS.get(scenario.hardware.kernel, scenario.hardware.kernel)
    notes = [f"Simulated, not measured{f'; attention at the speed of {kernel}' * bool(kernel)}."]
    notes += branches_notes(comparison)
    fitting = [row.found for row in comparison.rivals if row.found is not None]
    if comparison.kernels:
        said = [f"{ratio:.2f}x with {_KERNELS.get(name, name)}" for name, ratio in comparison.kernels.items()]
        notes.append(f"All rows have one kernel; over the best of FSDP2 the gain is {', '.join(said)}.")
    if any(found.planner == PADDED_RINGS for found in fitting):
        how = "what TRL and accelerate do today, one ring size for the run, whole rows, no packs"
        notes.append(f"{PADDED_RINGS}: {how}.")
    if any(found.planner == BY_WORK for found in fitting):
        how = "batches sorted by work, so that like ones run at once; no trainer does that by itself"
        notes.append(f"{BY_WORK}: {how}.")
    if comparison.powers is not None:
        how = "Megatron-Core's rule gives each sequence its GPUs; on this engine, with whole parameters on each GPU"
        notes.append(f"{POWERS}: {how}.")
    rings = [found.planner for found in fitting if found.mesh.lock_step and found.mesh.lock_step.degree > 1]
    if rings and scenario.shape.mixer_kept:
        how = "priced as if a ring could cut layers with states or convolutions; no trainer on FSDP2 does that"
        notes.append(f"{' and '.join(rings)}: {how}.")
    took = [
        f"{found.mesh.layout} {seconds(found.mean_seconds)}{' (with offload)' * _offloads(found)}"
        for row in layouts
        if (found := row.found) is not None
    ]
    if len(layouts) > 1 and took:
        takes = f"takes {comparison.auto}" if comparison.auto else "finds room for none without offload"
        whole = ", each sequence whole" * (comparison.shared is not None)
        notes.append(f"Layouts of Lengthwise{whole}: {', '.join(took)}; `shard: auto` {takes}.")
    return notes


def result_rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Return one row per planner, in the order of `COLUMNS`."""
    return [
        (
            each.planner,
            seconds(each.mean_seconds),
            str(_gain(_best_other(each, found), each)) if len(found) > 1 else "no other",
            percent(each.ideal_ratio),
            seconds(each.percentile_seconds(50)),
            seconds(each.percentile_seconds(100)),
            count(each.tokens_per_second),
            f"{percent(each.flops_ratio)}{_TOO_HIGH * (each.flops_ratio > MOST_MFU)}",
            percent(each.mean("idle_ratio")),
            percent(each.mean("exposed_ratio")),
            _gigabytes(each.most("memory_bytes")),
            *_mesh_cells(each),
        )
        for each in found
    ]


def _best_other(found: Found, among: Sequence[Found]) -> Found:
    """Return the planner of the shortest steps beside this one, or this one if it is alone."""
    return min((each for each in among if each is not found), key=lambda each: each.mean_seconds, default=found)


def _gain(other: Found, ours: Found) -> Gain:
    return gain_over(other.step_seconds, ours.step_seconds)


def _mesh_cells(found: Found) -> tuple[str, ...]:
    """Return the stages of a rank, then the largest values of the rest in any plan."""
    degree, heads, offload = (found.most(f"most_{name}") for name in ("degree", "heads", "offload"))
    kinds, mesh = Counter(step.recompute for step in found.steps), found.mesh
    many = {kind: f" ({counted(number, 'batch')})" * (len(kinds) > 1) for kind, number in kinds.items()}
    return (
        str(mesh.cut.stages),
        f"up to {degree:,}" if degree > 1 else "1",
        f"up to {heads}" if heads > 1 else "no",
        " and ".join(f"{kind}{number}" for kind, number in many.items()),
        f"up to {percent(offload)}" if offload else "no",
        " and ".join(f"{tokens:,}" for tokens in found.held_tokens.values()),
    )


def _mesh_text(found: Found) -> str:
    stages, ring, heads, recompute, offload, tokens = _mesh_cells(found)
    rings = f"rings of {ring}" if ring != "1" else "no sequence cut"
    words = [f"{stages} stages" if stages != "1" else "one GPU a rank", rings, f"{tokens} tokens a rank"]
    words += [f"heads split over {heads}"] * (heads != "no")
    words += [f"{recompute} computed again"] * (recompute != "none")
    words += [f"{offload} offloaded"] * (offload != "no")
    return ", ".join(words)


def simulation_table(found: Sequence[Best]) -> ColumnTable:
    """Return a table for a terminal of the planners that have a mesh, one column each."""
    rows = result_rows([each.found for each in found if each.found is not None])
    return ColumnTable(rows=list(zip(COLUMNS, *rows, strict=True)), title=DETAILS_TITLE)


def simulation_json(comparison: Comparison, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures, those of single batches too; ratios are of all ranks' time, times in seconds."""
    found, scenario = comparison.planners, comparison.scenario
    planned = [each.found for each in found if each.found is not None]
    rows = [(row, row.found) for row in comparison.rows]
    answer = {
        "sentence": answer_sentence(comparison, facts.get("lengths_in", "tokens")),
        "kernel": "" if scenario.cost else scenario.hardware.kernel,
        "kernels": dict(comparison.kernels),
        "layouts": {
            name: row.found.step_seconds if row.found else row.refusal and row.refusal.got
            for name, row in zip(LAYOUTS, comparison.layouts, strict=False)
        },
        "auto": comparison.auto or "",
        "branches": branches_json(comparison),
        "rows": [
            {
                "name": row.planner,
                "step_seconds": way.step_seconds if way else [],
                "memory_bytes": way.most("memory_bytes") if way else 0.0,
                "settings": _settings(way) if way else None,
                "refusal": row.refusal.got if row.refusal else "",
            }
            for row, way in rows
        ],
    }
    return {
        "schema": SCHEMA,
        "answer": answer,
        **facts,
        "plans_tried": {each.planner: each.tried for each in found},
        "refused": {each.planner: str(each.refusal) for each in found if each.found is None},
        "planners": {each.planner: _figures(each, _best_other(each, planned)) for each in planned},
    }


def _figures(found: Found, best_other: Found) -> dict[str, Any]:
    mesh = found.mesh
    most, of_steps = ("most_degree", "most_heads", "most_offload"), ("step_seconds", "bound_seconds")
    return {
        "stages": mesh.cut.stages,
        "heads": mesh.heads,
        "offload": mesh.offload,
        "capacities_tokens": dict(found.setting.capacities),
        **{name: [getattr(step, name) for step in found.steps] for name in (*most, *of_steps, "recompute")},
        "mean_seconds": found.mean_seconds,
        "p50_seconds": found.percentile_seconds(50),
        "p99_seconds": found.percentile_seconds(99),
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.flops_ratio,
        **{name: found.mean(name) for name in ("compute_ratio", "idle_ratio", "exposed_ratio")},
        "memory_bytes": found.most("memory_bytes"),
        "speedup_over_best_other": best_other.mean_seconds / found.mean_seconds,
        "ideal_ratio": found.ideal_ratio,
    }


def remarks(found: Sequence[Best], *, device_bytes: float, names: Mapping[str, str]) -> list[str]:
    """Return planners that need more memory than a device, or have no mesh. names: as for `LengthwiseError.render`."""
    said = []
    full = [each.planner for each in found if each.found and each.found.most("memory_bytes") > device_bytes]
    if full:
        said.append(
            f"more memory than the {_gigabytes(device_bytes)} that a device has: {', '.join(full)}; "
            "lower --capacity, or use more stages (--pp)"
        )
    for each in found:
        if each.found is None:
            why = f" ({each.refusal.render(names)})" if each.refusal else ""
            said.append(f"{each.planner}: no mesh holds these sequences{why}")
    return said


def _gigabytes(quantity_bytes: float) -> str:
    return f"{quantity_bytes / 1e9:.1f} GB"


def closing_sentences(
    found: Sequence[Best],
    devices: str,
    *,
    one_mesh: bool = False,
    not_compared: Sequence[str] = (),
    unit: str = "tokens",
) -> str:
    """Return sentences on a step with our planner, or the last that has a mesh, and on its gain over the best other.

    found: results by planner. devices: number and kind of devices. one_mesh: True if all planners had one mesh.
    not_compared: planners of the usual comparison that this one left out. unit: unit of lengths.
    """
    fitting = [each for each in found if each.found is not None]
    best = next((each for each in fitting if each.planner == OUR_PLANNER), fitting[-1])
    name, ours = best.planner, best.found
    assert ours is not None, f"{name} was chosen because it has a mesh"
    caveat = f"Simulated, not measured{'; lengths in bytes, not tokens' * (unit == 'bytes')}."
    step = f"On {devices} a step takes {seconds(ours.mean_seconds)} with {name}"
    step += f" ({_mesh_text(ours)}), {percent(ours.ideal_ratio)} of the ideal"
    others = [each.found for each in fitting if each is not best and each.found is not None]
    if not others:
        return f"{step}. {caveat}"
    other = min(others, key=lambda each: each.mean_seconds)
    what = f"{seconds(other.mean_seconds)} with {other.planner}, the best other plan ({_mesh_text(other)})"
    only = " All planners used one mesh; another mesh may be better for either planner." * one_mesh
    only += f" Not compared: {', '.join(not_compared)}; they may be better than {other.planner}." * bool(not_compared)
    return f"{step}, and {what}. {_verdict(name, other.planner, _gain(other, ours))}{only} {caveat}"


def _verdict(name: str, other: str, gain: Gain) -> str:
    of_batches = f"the spread of {gain.batches} batches" if gain.batches > 1 else "the unknown spread of one batch"
    error = f"{gain.low:.2f}x to {gain.high:.2f}x with an error of {percent(MODEL_ERROR)} of the model and {of_batches}"
    if gain.is_equal:
        return f"That is {gain.ratio:.2f}x ({error}): no gain beyond the error."
    if gain.ratio < 1:
        return f"{name} does not help here: {other} needs {percent(1 - gain.ratio)} fewer GPU hours ({error})."
    saved = f"{percent(1 - 1 / gain.ratio)} fewer GPU hours"
    return f"The same training needs {saved} ({gain.ratio:.2f}x; {error})."
