"""A timeline to look at: stretches of a rank, and a Chrome trace for chrome://tracing and ui.perfetto.dev.

In a trace nodes are processes, stages of ranks threads, passes slices; gaps are waits. Of thousands of ranks it shows
some: the first, the last to end, the one of least work, and some evenly over all ranks.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from lengthwise.core.plan import Plan
from lengthwise.core.timeline import Timeline

_MICROSECONDS = 1e6
_NAMED = 8  # sequences whose lengths a slice names


class Stretch(NamedTuple):
    """A stretch of a rank's time in seconds. kind: ring if it shares a sequence of the microbatch, else local."""

    start: float
    end: float
    kind: str


def stretches(plan: Plan, timeline: Timeline, rank: int) -> list[Stretch]:
    """Return the stretches of a rank, one per microbatch, in the order of the timeline."""
    found = []
    for row in np.flatnonzero(timeline.rank == rank).tolist():
        pieces = plan.microbatches[int(timeline.microbatch[row])].pieces
        kind = "ring" if any(piece.degree > 1 and rank in piece.ranks for piece in pieces) else "local"
        start = float(timeline.start[row])
        found.append(Stretch(start, start + float(timeline.busy_seconds[row]), kind))
    return found


def chosen_ranks(timeline: Timeline, most: int) -> list[int]:
    """Return at most `most` ranks to look at, ascending."""
    if timeline.ranks <= most:
        return list(range(timeline.ranks))
    busy = np.bincount(timeline.rank, weights=timeline.busy_seconds, minlength=timeline.ranks)
    wanted = [0, int(np.argmax(timeline.work_end_seconds)), int(np.argmin(busy))]
    wanted += np.linspace(0, timeline.ranks - 1, most, dtype=np.int64).tolist()
    return sorted(list(dict.fromkeys(wanted))[:most])


def chrome_trace(plan: Plan, timeline: Timeline, *, ranks_per_node: int, most_ranks: int = 64) -> str:
    """Return the trace of some ranks; times in microseconds, as the format requires."""
    shown = chosen_ranks(timeline, most_ranks)
    events: list[dict[str, Any]] = []
    for rank in shown:
        node = rank // ranks_per_node
        events.append({"ph": "M", "name": "process_name", "pid": node, "args": {"name": f"node {node}"}})
        done = float(timeline.step_seconds) - timeline.step_end_seconds
        for stage in range(timeline.stages):
            thread = rank * timeline.stages + stage
            name = f"rank {rank}" if timeline.stages == 1 else f"rank {rank}, stage {stage}"
            events.append({"ph": "M", "name": "thread_name", "pid": node, "tid": thread, "args": {"name": name}})
            for row in np.flatnonzero((timeline.rank == rank) & (timeline.stage == stage)).tolist():
                events += _slices(plan, timeline, row, node, thread)
            events.append(_slice("step end", node, thread, done, timeline.step_end_seconds, {}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _slices(plan: Plan, timeline: Timeline, row: int, node: int, thread: int) -> list[dict[str, Any]]:
    index = int(timeline.microbatch[row])
    microbatch = plan.microbatches[index]
    lengths = [plan.tokens[i] for piece in microbatch.pieces for i in piece.sequences]
    degree = max(piece.degree for piece in microbatch.pieces)
    clocks = (timeline.start, timeline.forward, timeline.backward, timeline.end)
    start, forward, backward, end = (float(clock[row]) for clock in clocks)
    facts = {
        "microbatch": index,
        "degree": degree,
        "sequences": len(lengths),
        "lengths_tokens": lengths[:_NAMED],
        "held_tokens": round(float(timeline.held_tokens[row])),
        "compute_seconds": float(timeline.compute[row]),
        "exposed_seconds": float(timeline.busy_seconds[row] - timeline.compute[row]),
    }
    name = f"ring of {degree}" if degree > 1 else f"pack of {len(lengths)}"
    return [
        _slice(f"forward, {name}", node, thread, start, forward - start, facts),
        _slice(f"backward, {name}", node, thread, backward, end - backward, facts),
    ]


def _slice(name: str, node: int, thread: int, start: float, seconds: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": _MICROSECONDS * start, "dur": _MICROSECONDS * seconds}
    return {"ph": "X", "name": name, "pid": node, "tid": thread, **times, "args": facts}
