"""A simulation as one HTML file (`html`): lengths, degrees against length, what ranks do, the table.

Everything that comes from outside (names of files and planners) is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import numpy as np

from lengthwise.core.names import counted
from lengthwise.core.plan import Plan
from lengthwise.core.timeline import Timeline
from lengthwise.report.drawing import Span, scatter_chart, span_chart
from lengthwise.report.figures import percent, seconds
from lengthwise.report.html import html_page, html_table, length_chart, scrolling, written_work
from lengthwise.report.simulation import COLUMNS, result_rows, shown_of, tables_of
from lengthwise.simulator import Best, Found, PlannerResult, chosen_ranks

_SHOWN_RANKS, _SHOWN_WHOLE, _SHOWN_CUT = 16, 200, 600
_GAP = 1e-4  # of the step: shorter gaps cannot be seen
_WORDS = (
    "Static: one mesh of rings for all steps, sized for the longest sequence.",
    "Other planners: packed-dp cuts no sequence; single-degree cuts all sequences of a step alike; power-of-two and "
    "bytescale choose for each sequence by their published rules; lengthwise does, so that all ranks "
    "end together.",
    "Rank: one copy of the model. Degree: the ranks that share one sequence (context parallelism of its own).",
    "Pack: whole sequences that one rank computes together.",
    "Ring: ranks that share the tokens of a long sequence and pass its keys and values round.",
    "Idle: time in which a rank has no microbatch. MFU: the model's floating-point operations over what the devices "
    "could do at their peak.",
    "Exposed: time inside microbatches without arithmetic, waiting for transfers, copies or a slower partner.",
    "Of ideal: the arithmetic alone, spread evenly over all devices at their best speed, over the step; 100 % loses "
    "nothing.",
)


def simulation_page(
    found: Sequence[Best],
    batches: Sequence[Sequence[int]],
    *,
    about: str,
    sentences: str,
    remarks: Sequence[str] = (),
) -> str:
    """Write the page; ranks are shown of the best other planner and of ours, on one scale of time."""
    *others, ours = (each.result for each in shown_of(found))
    shown = [*sorted(others, key=lambda each: each.mean_seconds)[:1], ours]
    most = max(each.first.step_seconds for each in shown)
    ranks = [
        f"<h2>Ranks over time: {escape(each.planner)}</h2>{scrolling(_ranks_chart(each, most))}"
        f"<p class=key>Blue: packs on one rank. Orange: rings. Grey: the step's end. Empty: waiting. "
        f"{len(_ranks_of(each.first))} of {each.first.ranks} ranks{_stage(each.first)}, the first batch: "
        f"{escape(seconds(each.first.step_seconds))}, {escape(percent(each.first.idle_ratio))} idle.</p>"
        for each in shown
    ]
    said = "".join(f"<p class=key>{escape(each)}</p>" for each in remarks)
    words = "".join(f"<p class=key>{escape(each)}</p>" for each in _WORDS)
    costs = "; ".join(dict.fromkeys(str(each.first_plan.notes["cost"]) for each in shown))
    return html_page(
        "Lengthwise: simulated steps",
        f"<h1>What these lengths cost</h1><p>{escape(sentences)}</p><p class=key>{escape(about)}</p>"
        f"{_tables(found)}{said}{words}<h2>Lengths</h2>{_histogram(batches)}"
        f"<h2>Ranks a sequence: {escape(ours.planner)}</h2>{_degrees(ours.first_plan)}"
        f"{''.join(ranks)}<p class=key>Simulated by lengthwise, not measured: costs {escape(costs)}.</p>",
    )


def _stage(timeline: Timeline) -> str:
    return f", stage 0 of {timeline.stages}" if timeline.stages > 1 else ""


def _tables(found: Sequence[Best]) -> str:
    """Write what trains first, then, where that is another, the best of all meshes tried."""
    return "".join(f"<h2>{escape(title)}</h2>{_table(each)}" for title, each in tables_of(found))


def _table(found: Sequence[Found]) -> str:
    return html_table([COLUMNS, *result_rows(found)])


def _histogram(batches: Sequence[Sequence[int]]) -> str:
    return length_chart([length for batch in batches for length in batch])


def _degrees(plan: Plan) -> str:
    pieces = [piece for microbatch in plan.microbatches for piece in microbatch.pieces]
    points = sorted({(plan.tokens[i], piece.degree) for piece in pieces for i in piece.sequences})
    cut = [point for point in points if point[1] > 1]
    whole = [point for point in points if point[1] == 1]
    shown = _spread(whole, _SHOWN_WHOLE) + _spread(cut, _SHOWN_CUT)
    labelled = [(float(x), float(y), f"{counted(x, 'token')} over {counted(y, 'rank')}") for x, y in shown]
    chart = scatter_chart(labelled, title="ranks a sequence", x_title="tokens of the sequence", y_title="ranks")
    caption = f"{len(shown)} of {len(points)} different pairs of length and degree are drawn."
    return f"{scrolling(chart)}<p class=key>{caption}</p>"


def _spread(points: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Take at most so many of them, evenly, the first and last included."""
    return [points[i] for i in np.linspace(0, len(points) - 1, min(len(points), most), dtype=int).tolist()]


def _ranks_of(timeline: Timeline) -> list[int]:
    return chosen_ranks(timeline, _SHOWN_RANKS)


def _ranks_chart(result: PlannerResult, most: float) -> str:
    timeline = result.first
    done = timeline.step_seconds - timeline.step_end_seconds
    rows = []
    for rank in _ranks_of(timeline):
        mine = np.flatnonzero((timeline.rank == rank) & (timeline.stage == 0)).tolist()
        if timeline.stages > 1:
            spans = [span for row in mine for span in _passes(result.first_plan, timeline, row)]
        else:
            spans = [_span(result.first_plan, timeline, run) for run in _runs(result.first_plan, timeline, mine)]
        rows.append(
            (f"rank {rank}", [*spans, Span(start=done, end=timeline.step_seconds, kind="end", tip="the step's end")])
        )
    return span_chart(rows, title=f"ranks over time, {result.planner}", most=most)


def _passes(plan: Plan, timeline: Timeline, row: int) -> list[Span]:
    """Draw the two passes of a stage apart: between them it runs other microbatches."""
    whole = _span(plan, timeline, [row])
    passes = ((timeline.start, timeline.forward, "forward"), (timeline.backward, timeline.end, "backward"))
    return [
        replace(whole, start=float(begin[row]), end=float(end[row]), tip=f"{name}, {whole.tip}")
        for begin, end, name in passes
    ]


def _runs(plan: Plan, timeline: Timeline, rows: list[int]) -> list[list[int]]:
    """Join packs that follow each other on one rank without a gap; a ring is a run of its own."""
    runs: list[list[int]] = []
    for row in rows:
        follows = runs and timeline.start[row] - timeline.end[runs[-1][-1]] < _GAP * timeline.step_seconds
        if follows and _degree(plan, timeline, row) == _degree(plan, timeline, runs[-1][-1]) == 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _degree(plan: Plan, timeline: Timeline, row: int) -> int:
    return max(piece.degree for piece in plan.microbatches[int(timeline.microbatch[row])].pieces)


def _span(plan: Plan, timeline: Timeline, rows: list[int]) -> Span:
    microbatches = [plan.microbatches[int(timeline.microbatch[row])] for row in rows]
    lengths = [plan.tokens[i] for m in microbatches for piece in m.pieces for i in piece.sequences]
    degree = _degree(plan, timeline, rows[0])
    what = f"ring of {degree}" if degree > 1 else f"{counted(len(rows), 'pack')} on this rank"
    return Span(
        start=float(timeline.start[rows[0]]),
        end=float(timeline.end[rows[-1]]),
        kind="ring" if degree > 1 else "local",
        tip=f"{what}: {written_work(len(lengths), sum(lengths))}",
    )
