"""A bound that knows that launches are whole: the time in which ranks could do all work, each in 1, 2, 3 ... launches.

Where a rank needs j and a part launches, let n ranks run at most j and the others at least j + 1:

    work <= min(n (T - g), D(n j capacity)) + (N - n) (T - (j + 1) g)        for some n of 0 .. N

D(S): the most work that S tokens can hold. A T for which no n will do is out of reach. Costs one sort and some array
operations over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.shape import Cluster
from lengthwise.planner.problem.lengths import NEARLY, ROUNDING


def whole_launches_bound(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    work_seconds: NDArray[np.float64],
    cluster: Cluster,
    launch_seconds: float,
) -> float:
    """Return the least time in which whole launches could do the work of `counts[i]` sequences of `lengths[i]`.

    Args:
        lengths: in tokens.
        counts: how many there are of each.
        work_seconds: arithmetic of one sequence of each length, which no cut makes less.
        cluster: ranks and their capacity.
        launch_seconds: what a launch takes on its rank.
    """
    ranks, capacity = cluster.ranks, cluster.capacity_tokens
    tokens, work = (lengths * counts).astype(np.float64), work_seconds * counts
    needed, total = float(tokens.sum()) / (ranks * capacity), float(work.sum())
    few, low = int(needed), total / ranks + needed * launch_seconds
    if launch_seconds == 0:
        return low
    densest = np.argsort(-work_seconds / lengths, kind="stable")
    held = np.concatenate(([0.0], np.cumsum(tokens[densest])))
    most = np.concatenate(([0.0], np.cumsum(work[densest])))
    with_few = np.arange(ranks + 1)
    by_tokens = np.interp(with_few * float(few * capacity), held, most)

    def feasible(seconds: float) -> bool:
        of_few = np.minimum(with_few * max(0.0, seconds - launch_seconds), by_tokens)
        of_others = (ranks - with_few) * max(0.0, seconds - (few + 1) * launch_seconds)
        return bool(np.max(of_few + of_others) >= total * (1 - ROUNDING))

    return least_feasible(feasible, low, total / ranks + (few + 1) * launch_seconds)  # at most, all run one more


def least_feasible(feasible: Callable[[float], bool], low: float, high: float) -> float:
    """Close in on the least feasible value between an infeasible and a feasible one; return the infeasible end."""
    while high - low > NEARLY * low and low < (middle := (low + high) / 2) < high:  # denormal numbers end here, too
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low
