"""A comparison as one HTML file: step times, lengths, GPUs that share a sequence, and GPUs over time; all escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from lengthwise.core.names import counted
from lengthwise.report.figures import seconds
from lengthwise.report.html import (
    bar_line,
    degree_chart,
    html_page,
    html_table,
    length_chart,
    scrolling,
    stretch_chart,
)
from lengthwise.report.simulation import DETAILS_TITLE, HEADS, answer_rows, simulation_table
from lengthwise.simulator import Comparison, Found, Stretch, stretches

_SHOWN_RANKS, _SHOWN_WHOLE, _SHOWN_CUT = 16, 200, 600
_GAP = 1e-3  # of the step: shorter gaps are invisible
_ROW_WORDS = (
    (
        "FSDP2",
        "parameters, gradients and optimizer states are sharded over all GPUs; a layer is gathered when it runs, and "
        "all GPUs wait for the slowest in each microbatch.",
    ),
    ("padded", "sequences of a microbatch are padded to its longest; by length: a microbatch has similar lengths."),
    ("packed", "whole sequences share a microbatch and do not attend to each other."),
    ("padded rings", "context parallelism as in TRL: one ring size, a sequence a row, nothing is packed."),
    ("one ring size", "context parallelism: every pack is cut over a ring; all rings have the same number of GPUs."),
    ("power-of-two degrees", "Megatron-Core's rule for the GPUs of each sequence, on the engine of Lengthwise."),
    ("Lengthwise", "each sequence is cut over as many GPUs as make the step faster; short ones are packed."),
    ("zero1, zero3", "Lengthwise with all parameters on each GPU, or with parameters sharded over all GPUs."),
    ("recompute all", "backward computes whole layers a second time, as gradient checkpointing does, to save memory."),
    ("recompute MLP", "backward computes everything but attention a second time."),
    ("ratio", "step time divided by that of Lengthwise."),
    ("memory", "of the fullest GPU at its peak, by formula."),
)
_DETAIL_WORDS = (
    (
        "packed-dp, static, single-degree",
        "no sequence is cut; one mesh of rings for all steps; one degree for each step.",
    ),
    ("power-of-two, bytescale", "a degree for each sequence, by their published rules."),
    ("of ideal", "arithmetic time, spread evenly over all GPUs, divided by the step time; 100 % is ideal."),
    ("MFU", "the model's floating-point operations over what the GPUs could do at their peak."),
    ("idle, exposed", "time without a microbatch; time in one without arithmetic, waiting for transfers or partners."),
)


def simulation_page(
    comparison: Comparison,
    *,
    about: str,
    sentence: str,
    notes: Sequence[str] = (),
    verdict: str = "",
    remarks: Sequence[str] = (),
) -> str:
    """Return the page; GPUs are shown over time for the best other way and for ours, on one scale."""
    ours, rows = comparison.ours.found, (comparison.best_other, comparison.ours)
    shown = [(row.planner, row.found) for row in rows if row is not None and row.found is not None]
    most = max((found.step_seconds[0] for _, found in shown), default=0.0)
    lines = "".join(f"<p class=key>{escape(each)}</p>" for each in (about, *notes))
    table = html_table([HEADS, *answer_rows(comparison)], wraps=True)
    parts = [
        f"<h1>{escape(sentence)}</h1>{lines}<h2>Step times</h2>{_bars(comparison)}{table}{_words(_ROW_WORDS)}",
        f"<h2>Lengths of the sequences</h2>{length_chart([each for batch in comparison.batches for each in batch])}",
    ]
    if ours is not None:
        parts.append(f"<h2>GPUs that share a sequence, with Lengthwise</h2>{_degrees(ours)}")
    parts += [_devices(name, found, comparison.scenario.devices, most) for name, found in shown]
    if comparison.planners:
        parts.append(_details(comparison, verdict, remarks))
    return html_page("Lengthwise: simulated steps", "".join(parts))


def _bars(comparison: Comparison) -> str:
    most = max((row.found.mean_seconds for row in comparison.rows if row.found), default=1.0)
    cells = []
    for row in comparison.rows:
        found, kind = row.found, "ours" if row is comparison.ours else "bar"
        bar = bar_line(found.mean_seconds / most, kind) if found else ""
        took = seconds(found.mean_seconds) if found else "does not fit"
        cells.append(f"<tr><td>{escape(row.planner)}</td><td class=line>{bar}</td><td>{escape(took)}</td></tr>")
    return f"<table class=steps>{''.join(cells)}</table>"


def _words(words: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<p class=key><b>{escape(word)}</b>: {escape(means)}</p>" for word, means in words)


def degrees_of(found: Found) -> list[tuple[int, int]]:
    """Return the different (tokens of a whole sequence, its ranks) of the first batch, ascending."""
    plan = found.first_plan
    firsts, continued = plan.firsts, set(plan.parents)
    pieces = (piece for microbatch in plan.microbatches for piece in microbatch.pieces)
    those = ((i, piece.degree) for piece in pieces for i in piece.sequences if i not in continued)
    return sorted({(firsts[i] + plan.tokens[i], degree) for i, degree in those})


def _degrees(found: Found) -> str:
    pairs = degrees_of(found)
    whole, cut = ([pair for pair in pairs if (pair[1] > 1) is is_cut] for is_cut in (False, True))
    shown = _spread(whole, _SHOWN_WHOLE) + _spread(cut, _SHOWN_CUT)
    chart = degree_chart([(x, y, f"{counted(x, 'token')} over {counted(y, 'GPU')}") for x, y in shown])
    caption = f"First batch; {len(shown)} of {len(pairs)} different pairs of length and GPUs are drawn."
    return f"{scrolling(chart)}<p class=key>{caption}</p>"


def _spread(points: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    return [points[i] for i in np.linspace(0, len(points) - 1, min(len(points), most), dtype=int).tolist()]


def _devices(name: str, found: Found, devices: int, most: float) -> str:
    ranks = np.unique(np.linspace(0, devices - 1, min(devices, _SHOWN_RANKS), dtype=int)).tolist()
    rows = [(f"GPU {rank}", _joined(stretches(found.first_plan, found.first, rank), most)) for rank in ranks]
    chart = stretch_chart(rows, title=f"GPUs over time, {name}", most=most)
    shown = f"{len(ranks)} of {counted(devices, 'GPU')}, the first batch, {seconds(found.step_seconds[0])}"
    return (
        f"<h2>GPUs over time: {escape(name)}</h2>{scrolling(chart)}"
        f"<p class=key>{escape(shown)}. Blue: whole sequences. Orange: parts of sequences that GPUs share. Empty: "
        "waiting for other GPUs, or for parameters and gradients.</p>"
    )


def _joined(found: Sequence[Stretch], most: float) -> list[Stretch]:
    """Join consecutive stretches of one kind without a visible gap."""
    joined: list[Stretch] = []
    for start, end, kind in sorted(found):
        if joined and joined[-1].kind == kind and start - joined[-1].end < _GAP * most:
            start = joined.pop().start
        joined.append(Stretch(start, end, kind))
    return joined


def _details(comparison: Comparison, verdict: str, remarks: Sequence[str]) -> str:
    table = f"<h3>{escape(DETAILS_TITLE)}</h3>{html_table(simulation_table(comparison.planners).rows, wraps=True)}"
    said = "".join(f"<p class=key>{escape(each)}</p>" for each in (verdict, *remarks))
    return f"<h2>Planners in detail</h2>{table}{said}{_words(_DETAIL_WORDS)}"
