"""A simulation as one HTML file (`html`): step times, lengths, ranks a sequence, and devices over time; all escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from lengthwise.core.names import counted
from lengthwise.report.answer import HEADS, answer_rows
from lengthwise.report.drawing import Span, scatter_chart, span_chart
from lengthwise.report.figures import seconds
from lengthwise.report.html import bar_line, html_page, html_table, length_chart, scrolling
from lengthwise.report.simulation import COLUMNS, result_rows, tables_of
from lengthwise.simulator import Answer, Best, WayRow

_SHOWN_RANKS, _SHOWN_WHOLE, _SHOWN_CUT = 16, 200, 600
_GAP = 1e-3  # of the step: shorter gaps cannot be seen
_ROW_WORDS = (
    (
        "FSDP2",
        "parameters, gradients and optimizer states are sharded over all GPUs; a layer is gathered when it runs, and "
        "all GPUs wait for the slowest in each microbatch.",
    ),
    ("padded", "sequences of a microbatch are padded to its longest; by length: a microbatch has similar lengths."),
    ("packed", "whole sequences share a microbatch and do not attend to each other."),
    ("one ring size", "context parallelism: every pack is cut over a ring; all rings have the same number of GPUs."),
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
    answer: Answer,
    batches: Sequence[Sequence[int]],
    *,
    about: str,
    sentence: str,
    notes: Sequence[str] = (),
    details: Sequence[Best] = (),
    verdict: str = "",
    remarks: Sequence[str] = (),
) -> str:
    """Write the page; devices are shown over time for the best other way and for ours, on one scale."""
    ours, other = answer.ours, answer.best_other
    shown = [row for row in (other, ours) if row is not None and row.step_seconds]
    most = max((row.step_seconds[0] for row in shown), default=0.0)
    lines = "".join(f"<p class=key>{escape(each)}</p>" for each in (about, *notes))
    parts = [
        f"<h1>{escape(sentence)}</h1>{lines}<h2>Step times</h2>{_bars(answer)}{_table(answer)}{_words(_ROW_WORDS)}",
        f"<h2>Lengths of the sequences</h2>{length_chart([length for batch in batches for length in batch])}",
    ]
    if ours.degrees:
        parts.append(f"<h2>GPUs that share a sequence, with Lengthwise</h2>{_degrees(ours)}")
    parts += [_devices(row, answer.devices, most) for row in shown]
    if details:
        parts.append(_details(details, verdict, remarks))
    return html_page("Lengthwise: simulated steps", "".join(parts))


def _bars(answer: Answer) -> str:
    most = max((row.mean_seconds for row in answer.rows if row.step_seconds), default=1.0)
    cells = []
    for row in answer.rows:
        kind = "ours" if row is answer.ours else "bar"
        bar = bar_line(row.mean_seconds / most, kind) if row.step_seconds else ""
        took = seconds(row.mean_seconds) if row.step_seconds else "does not fit"
        cells.append(f"<tr><td>{escape(row.name)}</td><td class=line>{bar}</td><td>{escape(took)}</td></tr>")
    return f"<table class=steps>{''.join(cells)}</table>"


def _table(answer: Answer) -> str:
    return html_table([HEADS, *answer_rows(answer)], wraps=True)


def _words(words: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<p class=key><b>{escape(word)}</b>: {escape(means)}</p>" for word, means in words)


def _degrees(ours: WayRow) -> str:
    cut = [point for point in ours.degrees if point[1] > 1]
    whole = [point for point in ours.degrees if point[1] == 1]
    shown = _spread(whole, _SHOWN_WHOLE) + _spread(cut, _SHOWN_CUT)
    labelled = [(float(x), float(y), f"{counted(x, 'token')} over {counted(y, 'GPU')}") for x, y in shown]
    chart = scatter_chart(
        labelled, title="GPUs that share a sequence", x_title="tokens of the sequence", y_title="GPUs"
    )
    caption = f"First batch; {len(shown)} of {len(ours.degrees)} different pairs of length and GPUs are drawn."
    return f"{scrolling(chart)}<p class=key>{caption}</p>"


def _spread(points: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    return [points[i] for i in np.linspace(0, len(points) - 1, min(len(points), most), dtype=int).tolist()]


def _devices(row: WayRow, devices: int, most: float) -> str:
    ranks = np.unique(np.linspace(0, devices - 1, min(devices, _SHOWN_RANKS), dtype=int)).tolist()
    spans = [(f"GPU {rank}", _spans(row, rank, most)) for rank in ranks]
    chart = span_chart(spans, title=f"GPUs over time, {row.name}", most=most)
    shown = f"{len(ranks)} of {counted(devices, 'GPU')}, the first batch, {seconds(row.step_seconds[0])}"
    return (
        f"<h2>GPUs over time: {escape(row.name)}</h2>{scrolling(chart)}"
        f"<p class=key>{escape(shown)}. "
        "Blue: whole sequences. Orange: parts of sequences that GPUs share. Empty: waiting for other GPUs, or for "
        "parameters and gradients.</p>"
    )


def _spans(row: WayRow, rank: int, most: float) -> list[Span]:
    """Join consecutive stretches of one kind without a visible gap."""
    spans: list[Span] = []
    for each in sorted((stretch for stretch in row.stretches if stretch.rank == rank), key=lambda each: each.start):
        start = each.start
        if spans and spans[-1].kind == each.kind and start - spans[-1].end < _GAP * most:
            start = spans.pop().start
        tip = f"{seconds(start)} to {seconds(each.end)}"
        spans.append(Span(start=start, end=each.end, kind=each.kind, tip=tip))
    return spans


def _details(found: Sequence[Best], verdict: str, remarks: Sequence[str]) -> str:
    tables = "".join(
        f"<h3>{escape(title)}</h3>{html_table(list(zip(COLUMNS, *result_rows(each), strict=True)), wraps=True)}"
        for title, each in tables_of(found)
    )
    said = "".join(f"<p class=key>{escape(each)}</p>" for each in (verdict, *remarks))
    return f"<h2>Planners in detail</h2>{tables}{said}{_words(_DETAIL_WORDS)}"
