"""What ranks do over one simulated step, as lines of text."""

from __future__ import annotations

import numpy as np

from lengthwise.core.plan import Plan
from lengthwise.core.timeline import Timeline

KEY = "# packs on one rank, = rings, + the step's end, . waiting"


def rank_lines(plan: Plan, timeline: Timeline, *, most_seconds: float, width: int = 60) -> list[str]:
    """Draw one line a rank, `width` characters for `most_seconds`; a character is what the middle of its time holds."""
    column = most_seconds / width
    middles = (np.arange(width) + 0.5) * column
    done = timeline.step_seconds - timeline.step_end_seconds
    lines = []
    for rank in range(timeline.ranks):
        drawn = np.where(middles < done, ".", np.where(middles < timeline.step_seconds, "+", " "))
        for row in np.flatnonzero(timeline.rank == rank).tolist():
            pieces = plan.microbatches[int(timeline.microbatch[row])].pieces
            inside = (middles >= timeline.start[row]) & (middles < timeline.end[row])
            drawn[inside] = "=" if any(rank in each.ranks for each in pieces if each.degree > 1) else "#"
        lines.append(f"rank {rank:>{len(str(timeline.ranks - 1))}} |{''.join(drawn.tolist()).rstrip()}|")
    return lines
