"""The time that no plan can beat: the yardstick of every comparison.

The bound is the least T for which every sequence has a degree d >= s / capacity with t(d) <= T, and for which the work
of all, each at its cheapest such degree, is at most ranks x T. Launches count: a sequence packed on one rank owes its
share of a launch, g s / capacity, since no launch carries more than `capacity` tokens; a ring owes g on each rank.

That is true where a ring holds one sequence and has its microbatch for itself. A plan that cuts whole packs, or puts
several pieces in one microbatch, can share launches and hide the transfers of one sequence behind another:
`lone_rings=False` gives the weaker bound that holds for those too. There a sequence owes its arithmetic, and launches
only for what the rounding rule of the plan file (one token a sequence and rank, at most) cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.shape import Cluster
from lengthwise.cost import CostModel
from lengthwise.planner.degrees import least_degrees
from lengthwise.planner.request import least_degrees_held, read_tokens, refuse_unheld

_BISECTIONS = 40


def bound_seconds(tokens: Sequence[int], cluster: Cluster, cost: CostModel, *, lone_rings: bool = True) -> float:
    """Return the least makespan, in seconds, that any plan of these lengths could have.

    Args:
        tokens: lengths of the sequences.
        cluster: ranks and capacity; no offload.
        cost: the costs that the plan is scored with.
        lone_rings: whether every ring holds one sequence and has its microbatch for itself.

    Raises:
        PlanError: a sequence that the cluster cannot hold.
    """
    checked = read_tokens(tokens)
    refuse_unheld(checked, cluster)
    lengths, counts = np.unique(np.array(checked, dtype=np.int64), return_counts=True)
    least = least_degrees_held(lengths, cluster.capacity_tokens)
    ranks, capacity = cluster.ranks, cluster.capacity_tokens
    alone = cost.compute_seconds(lengths)
    shared = cost.fixed_seconds / capacity

    def owed(degrees: NDArray[np.int64], picked: NDArray[np.bool_]) -> float:
        """Seconds of one rank that the picked lengths owe, together."""
        some = lengths[picked]
        if not lone_rings:
            return float(counts[picked] @ (alone[picked] + shared * np.maximum(some - ranks, 0)))
        rings = degrees * (cost.ring_piece_seconds(some, degrees) + cost.fixed_seconds)
        return float(counts[picked] @ np.where(degrees > 1, rings, alone[picked] + shared * some))

    everything = np.ones(len(lengths), dtype=np.bool_)
    low = owed(least, everything) / ranks
    settled = (least == 1) & (alone + cost.fixed_seconds <= low)  # these stay on one rank, whatever T above `low`
    base = owed(least[settled], settled)
    open_, open_least = lengths[~settled], least[~settled]
    most = np.full_like(open_, ranks)

    def feasible(seconds: float) -> bool:
        degrees = least_degrees(cost, open_, open_least, most, seconds)
        return bool(np.all(degrees <= ranks)) and base + owed(degrees, ~settled) <= ranks * seconds * (1 + 1e-12)

    if feasible(low):
        return low
    slowest = cost.ring_piece_seconds(open_, open_least).max() + cost.fixed_seconds
    return _least_feasible(feasible, low, max(low, float(slowest)))


def _least_feasible(feasible: Callable[[float], bool], low: float, high: float) -> float:
    """Close in on the least feasible value between an infeasible and a feasible one; return the infeasible end."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if feasible(middle):
            high = middle
        else:
            low = middle
    return low
