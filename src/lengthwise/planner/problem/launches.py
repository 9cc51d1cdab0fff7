"""A bound that knows that launches are whole: the time in which ranks could do all work, each in 1, 2, 3 ... launches.

That no launch carries more than `capacity` tokens makes S tokens owe S / capacity launches; but a rank that needs 1.4
of them runs 2. It runs 1 only if its tokens fit, and then it is done early, unless they are the longest sequences',
which hold the most work a token. So for any whole j let n ranks run at most j launches and the others at least j + 1:

    work <= min(n (T - g), D(n j capacity)) + (N - n) (T - (j + 1) g)        for some n of 0 .. N

where D(S) is the most work that S tokens can hold: those of the longest sequences. A T for which no n will do is out of
reach, whichever j shows it; j is the whole part of launches a rank. That is true of any plan in which no rank holds
more than its capacity in a launch. Of 512 sequences of wikipedia on 32 ranks (1.4 to 1.8 launches each) it is up to
2.5 % above the bound that counts parts of launches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.shape import Cluster

_BISECTIONS = 30
_WORTH = 1e-4  # of the time of a rank; cheaper launches are not worth the search


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
    if launch_seconds <= _WORTH * low:
        return low
    densest = np.argsort(-work_seconds / lengths, kind="stable")
    held = np.concatenate(([0.0], np.cumsum(tokens[densest])))
    most = np.concatenate(([0.0], np.cumsum(work[densest])))
    with_few = np.arange(ranks + 1)
    by_tokens = np.interp(with_few * float(few * capacity), held, most)

    def feasible(seconds: float) -> bool:
        of_few = np.minimum(with_few * max(0.0, seconds - launch_seconds), by_tokens)
        of_others = (ranks - with_few) * max(0.0, seconds - (few + 1) * launch_seconds)
        return bool(np.max(of_few + of_others) >= total * (1 - 1e-12))

    high = total / ranks + (few + 1) * launch_seconds  # all of them run one launch more
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low
