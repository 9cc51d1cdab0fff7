"""A lower bound of every plan's time, the yardstick of all comparisons. Proof: docs/decisions/bound-by-kind.md.

Every sequence has a degree d >= s / capacity with t(d) <= T; the work of all, each at its cheapest such degree, is at
most ranks x T. Bisection finds the least T. Overhead counts in parts here, as whole launches in
`_whole_launches_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import ROUNDING_TOKENS, fullest_tokens
from lengthwise.core.plan import Plan
from lengthwise.core.shape import UNCUT, Cluster, LayerCut
from lengthwise.cost import Cost
from lengthwise.planner.problem.degrees import DegreeTable, cheapest_degrees
from lengthwise.planner.problem.speeds import at_mean_speed, read_speeds
from lengthwise.planner.problem.step_lengths import NEARLY, ROUNDING, read_tokens, refuse_unheld
from lengthwise.planner.problem.topology import Topology


def bound_seconds(
    tokens: Sequence[int],
    cluster: Cluster,
    cost: Cost,
    *,
    lone_rings: bool = True,
    shared_launches: bool = False,
    whole_launches: bool = True,
    speeds: Sequence[float] | None = None,
) -> float:
    """Return a lower bound of the makespan, in seconds, of all plans of these lengths.

    Args:
        tokens: lengths of the sequences.
        cluster: ranks and capacity; no offload.
        cost: the costs that the plan is scored with.
        lone_rings: True if every ring holds one sequence, over at least s / capacity ranks.
        shared_launches: True if such a ring may share its microbatch, with no rank above the capacity.
        whole_launches: True to count launches also as whole numbers on each rank, if rings hold one sequence.
        speeds: relative speed of each rank (default: all 1).

    Raises:
        PlanError: a sequence that the cluster cannot hold.
        ConfigError: invalid speeds.
    """
    checked = read_tokens(tokens)
    refuse_unheld(checked, cluster)
    lengths = np.array(checked, dtype=np.int64)
    cost, relative = at_mean_speed(cost, read_speeds(speeds, cluster.ranks))
    topology = Topology(cost, cluster.ranks, relative, cluster.capacity_tokens)
    parts = least_makespan(
        lengths, cluster, cost, topology=topology, lone_rings=lone_rings, shared_launches=shared_launches
    )
    return max(parts, launches_makespan(lengths, cluster, cost, topology)) if lone_rings and whole_launches else parts


def launches_makespan(tokens: NDArray[np.int64], cluster: Cluster, cost: Cost, topology: Topology) -> float:
    """Bound the makespan by each rank's whole launches, if rings hold one sequence; 0 at unequal speeds."""
    if topology.speeds is not None:
        return 0.0
    lengths, counts = np.unique(tokens, return_counts=True)
    roomy = replace(cluster, capacity_tokens=cost.most_held_tokens(cluster.capacity_tokens) + ROUNDING_TOKENS)
    return _whole_launches_bound(lengths, counts, cost.compute_seconds(lengths), roomy, cost.fixed_seconds)


def least_makespan(
    tokens: NDArray[np.int64],
    cluster: Cluster,
    cost: Cost,
    *,
    topology: Topology,
    lone_rings: bool = True,
    shared_launches: bool = False,
    cut: LayerCut = UNCUT,
) -> float:
    """Return `bound_seconds` for checked lengths. cost: costs at the mean speed of `topology`."""
    lengths, counts = np.unique(tokens, return_counts=True)
    ranks, capacity = cluster.ranks, cluster.capacity_tokens
    launch_tokens = capacity if shared_launches else None
    held = cost.most_held_tokens(cluster.capacity_tokens)
    stretch = (held + (held > capacity)) / capacity  # factor of the capacity and of the tokens allowed for rounding
    if lone_rings:
        least = cheapest_degrees(cost, lengths, cluster, launch_tokens=launch_tokens)
    else:
        least = _least_degrees_allowed(lengths, counts, cluster, stretch)
        cost = cost.without_copies()
    alone = cost.compute_seconds(lengths)
    shared = cost.fixed_seconds / capacity
    num_tokens = sum(tokens.tolist())  # Python's whole numbers do not overflow

    spent, best = (cost, cost) if topology.speeds is None else (topology.least_spent, topology.best_places)

    launches = 0.0 if lone_rings else shared * max(0, num_tokens / stretch - ranks * len(tokens))  # of all ranks

    def owed(degrees: NDArray[np.int64], picked: NDArray[np.bool_]) -> float:
        some = lengths[picked]
        if not lone_rings:
            return float(counts[picked] @ alone[picked])
        launch = shared * np.minimum(some, degrees * capacity) if shared_launches else degrees * cost.fixed_seconds
        rings = degrees * spent.ring_piece_seconds(some, degrees) + launch
        return float(counts[picked] @ np.where((degrees > 1) | (some > capacity), rings, alone[picked] + shared * some))

    fill = cut.fill * best.fixed_seconds  # the shortest possible first and last microbatch
    quick = cut.stages * (best.ring_piece_seconds(lengths, least) + best.fixed_seconds)  # at the cheapest degree
    low = (owed(least, np.ones(len(lengths), dtype=np.bool_)) + launches) / ranks + fill
    settled = quick <= low  # these keep their least degree at any T above `low`
    base = owed(least[settled], settled) + launches
    open_, open_least = lengths[~settled], least[~settled]
    table = DegreeTable(best, open_, open_least, np.full_like(open_, ranks), launch_tokens=launch_tokens)

    def feasible(seconds: float) -> bool:
        degrees = table.within(seconds / cut.stages)
        room = ranks * (seconds - fill) * (1 + ROUNDING)
        return bool(np.all(degrees <= ranks)) and base + owed(degrees, ~settled) <= room

    if feasible(low):
        return low
    return _least_feasible(feasible, low, max(low, float(quick.max())))


def has_lone_rings(plan: Plan) -> bool:
    """Return whether each ring holds one sequence, in its own microbatch, over at least s / capacity ranks."""
    return all(len(microbatch.pieces) == 1 for microbatch in plan.microbatches) and _are_held(plan)


def shares_launches_only(plan: Plan) -> bool:
    """Return whether rings hold one sequence over at least s / capacity ranks, and no rank too many tokens."""
    return _are_held(plan) and all(
        fullest_tokens(plan, microbatch) <= plan.capacity
        for microbatch in plan.microbatches
        if len(microbatch.pieces) > 1
    )


def _are_held(plan: Plan) -> bool:
    """Return whether each ring holds one sequence that fits its ranks, and offloading microbatches have one piece."""
    for microbatch in plan.microbatches:
        if microbatch.offload:
            if sum(len(piece.sequences) for piece in microbatch.pieces) > 1:
                return False
            continue
        for piece in microbatch.pieces:
            held = len(piece.ranks) * plan.capacity
            if len(piece.ranks) > 1 and not (len(piece.sequences) == 1 and plan.tokens[piece.sequences[0]] <= held):
                return False
    return True


def _least_degrees_allowed(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], cluster: Cluster, stretch: float
) -> NDArray[np.int64]:
    """Return the ranks that memory needs for each length, if one that offloads holds `stretch` times more."""
    short = lengths < 2 * cluster.ranks
    most_alone = cluster.capacity_tokens + int(counts[short].sum()) - short
    alone, beside = ((stretch * most).astype(np.int64) for most in (most_alone, most_alone + 1))
    return np.where(lengths <= alone, 1, np.maximum(2, -(-lengths // beside)))


def _whole_launches_bound(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    work_seconds: NDArray[np.float64],
    cluster: Cluster,
    launch_seconds: float,
) -> float:
    """Return the least time in which whole microbatches could do the work of `counts[i]` sequences of `lengths[i]`.

    If one of n ranks runs at most j microbatches of overhead g and the others j + 1 or more, then
    work <= min(n (T - g), D(n j capacity)) + (N - n) (T - (j + 1) g), D(S) the most work that S tokens hold.
    A T that no n of 0 .. N allows is out of reach.
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

    return _least_feasible(feasible, low, total / ranks + (few + 1) * launch_seconds)  # at most: all run one more


def _least_feasible(feasible: Callable[[float], bool], low: float, high: float) -> float:
    """Bisect between an infeasible and a feasible value; return the infeasible end."""
    while high - low > NEARLY * low and low < (middle := (low + high) / 2) < high:  # also ends for denormal numbers
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return low
