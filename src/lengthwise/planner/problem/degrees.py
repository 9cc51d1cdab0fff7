"""Over how many ranks a sequence is cut: what memory needs, grown until the sequence no longer sets the makespan.

t(d), the seconds of one sequence alone over d ranks, falls with d until exposed transfers or hops outweigh the gain.
Under `Cost` each of its two branches (transfers hidden, transfers exposed) is a / d + h d + constant, so the least
degree that keeps t(d) within a limit is the lower root of a quadratic. No search: arrays of any size in a few
operations. Other costs have no closed form: see `degree_table`.

What memory needs may be a choice, too (`cost.Choices`): a rank that offloads holds more than its capacity, at the
price of copies. Growth then starts from the degree that takes least of all ranks' time, between the fewest that hold
a sequence with everything offloaded and those that need not offload. Where heads are split, only degrees that nodes and
groups of heads divide are worth trying, and rings of such degrees, widest first, also start at borders of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner.problem.degree_table import DegreeTable, RingPrices
from lengthwise.planner.problem.lengths import least_degrees_held

GROWTH_FLOOR_TOKENS = 4096  # growth stops here: attention blocks under 2K tokens run slower than the formula says
_MOST_STACKED = 12  # rings on top of each other, beyond which what is left over is small
_NEARLY_WHOLE = 0.8  # of its part of the time, from which a ring is not cut further
_SLACK = 1e-12  # rounding of the roots, always taken in favour of the smaller degree
_LOST = 1e-15  # of a sum, by which its parts may be off

Growth = Callable[[float], NDArray[np.int64]]
"""Seconds that no sequence should take longer than -> degrees."""


def least_degrees(
    cost: Cost, lengths: NDArray[np.int64], least: NDArray[np.int64], most: NDArray[np.int64], seconds: float
) -> NDArray[np.int64]:
    """Find the cheapest degree in [least, most] at which each sequence, with its launch, ends within `seconds`.

    Entries for which there is none are most + 1. The cheapest is the least, but where offload or heads are chosen.
    """
    return degree_search(cost, lengths, least, most)(seconds)


def degree_search(
    cost: RingPrices,
    lengths: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    *,
    only: NDArray[np.int64] | None = None,
    launch_tokens: int | None = None,
) -> Callable[[float], NDArray[np.int64]]:
    """Return `least_degrees` of these sequences as a function of `seconds`, for who asks again and again.

    `only` and `launch_tokens` are those of `DegreeTable`.
    """
    if isinstance(cost, Cost) and not cost.prices_choices:
        return partial(_solved_degrees, cost, lengths, least, most)
    return DegreeTable(cost, lengths, least, most, only=only, launch_tokens=launch_tokens).within


def most_held_tokens(cost: Cost, cluster: Cluster) -> int:
    """Tell how many tokens of one piece a rank holds at most, offloading as far as these costs allow."""
    return cost.most_held_tokens(cluster.capacity_tokens)


def fewest_degrees(cost: Cost, lengths: NDArray[np.int64], cluster: Cluster) -> NDArray[np.int64]:
    """Count the fewest ranks that hold each sequence, offloading as far as these costs allow."""
    return least_degrees_held(lengths, most_held_tokens(cost, cluster))


def cheapest_degrees(
    cost: Cost,
    lengths: NDArray[np.int64],
    cluster: Cluster,
    *,
    only: NDArray[np.int64] | None = None,
    launch_tokens: int | None = None,
) -> NDArray[np.int64]:
    """Find the degree that takes least of all ranks' time, launch included: of those that hold a sequence."""
    fewest = fewest_degrees(cost, lengths, cluster)
    if not cost.chooses_by_degree:
        return fewest
    held = least_degrees_held(lengths, cluster.capacity_tokens)
    if cost.choices.splits_heads:
        held = np.where(held > 1, cluster.ranks, 1) if only is None else _rounded_up(held, only)
    most = np.maximum(fewest, np.minimum(held, cluster.ranks))
    chosen, long = fewest.copy(), np.flatnonzero(most > 1)
    table = DegreeTable(cost, lengths[long], fewest[long], most[long], only=only, launch_tokens=launch_tokens)
    chosen[long] = table.cheapest()
    return chosen


def hidden_degrees(cost: Cost, lengths: NDArray[np.int64], cluster: Cluster) -> NDArray[np.int64]:
    """Count the fewest ranks that hold each sequence with the offload that compute hides: Eq. 3 of ByteScale.

    The ratio that is free and the degree that then holds a sequence depend on each other; halved to the first degree at
    which the ratio that is needed is free.
    """
    low, high = fewest_degrees(cost, lengths, cluster), least_degrees_held(lengths, cluster.capacity_tokens)
    if not cost.chooses:
        return high
    high = np.minimum(high, cluster.ranks)
    while np.any(low < high):
        middle = (low + high) // 2
        free = cost.hides_copies(lengths, middle)
        low, high = np.where(free, low, np.minimum(middle + 1, high)), np.where(free, middle, high)
    return high


def useful_degrees(cost: Cost, ranks: int) -> NDArray[np.int64] | None:
    """List the degrees worth trying where heads are split; None where any degree is."""
    if not cost.choices.splits_heads:
        return None
    node = cost.ranks_per_node
    powers = {1 << power for power in range(node.bit_length()) if 1 << power <= min(node, ranks)}
    return np.array(sorted(powers | {*range(node, ranks + 1, node), ranks}), dtype=np.int64)


def _rounded_up(degrees: NDArray[np.int64], only: NDArray[np.int64]) -> NDArray[np.int64]:
    return only[np.minimum(np.searchsorted(only, degrees), len(only) - 1)]


def rounded_down(degrees: NDArray[np.int64], least: NDArray[np.int64], only: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round degrees down to those worth trying, not below the least."""
    return np.maximum(least, only[np.searchsorted(only, degrees, side="right") - 1])


def without_launch(seconds: float, launch_seconds: float) -> float:
    """Tell what a launch leaves of a limit.

    Beside a launch a million times as long, what is left of the sum of both has lost its last digits: rounding is taken
    in favour of what has to fit.
    """
    left, rounding = seconds - launch_seconds, _LOST * seconds
    return left + rounding if rounding > _SLACK * left else left


def _solved_degrees(
    cost: Cost, lengths: NDArray[np.int64], least: NDArray[np.int64], most: NDArray[np.int64], seconds: float
) -> NDArray[np.int64]:
    tokens = lengths.astype(np.float64)
    hop, budget = cost.hop_seconds, without_launch(seconds, cost.fixed_seconds)
    compute = cost.compute_seconds(lengths)
    hidden = _lower_root(compute, np.full_like(tokens, budget), hop)
    transfers = cost.ring_seconds * tokens
    exposed = _lower_root(cost.linear_seconds * tokens - transfers, budget - transfers, hop)
    beyond = most.astype(np.float64) + 1
    wanted = np.minimum(np.maximum(np.maximum(hidden, exposed), 2.0), beyond)
    degrees = np.maximum(np.ceil(wanted * (1 - _SLACK)).astype(np.int64), least)
    alone = (least == 1) & (compute <= budget * (1 + _SLACK))
    degrees = np.where(alone, 1, degrees)
    quick = cost.ring_piece_seconds(lengths, np.maximum(degrees, 1)) <= budget * (1 + 1e-9)
    return np.where(quick & (degrees <= most), degrees, most + 1)


def _lower_root(work: NDArray[np.float64], budget: NDArray[np.float64], hop: float) -> NDArray[np.float64]:
    """Solve work / d + hop (d - 1) <= budget for the least real d (0: any, inf: none)."""
    width = budget + hop
    inside = width * width - 4 * hop * np.maximum(work, 0.0)
    solvable = (width > 0) & (inside >= 0)
    root = np.sqrt(np.maximum(inside, 0.0)) + np.where(solvable, width, 1.0)
    return np.where(work <= 0, 0.0, np.where(solvable, 2 * np.maximum(work, 0.0) / root, np.inf))


def quickest_degrees(
    cost: Cost,
    lengths: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    *,
    only: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Find the degree in [least, most] of least t(d), from a grid of steps of an eighth; ties take the fewest ranks."""
    if only is not None:
        return DegreeTable(cost, lengths, least, most, only=only).quickest()
    best, best_seconds = least, cost.ring_piece_seconds(lengths, least)
    factor = 1.0
    while np.any(factor * least < most):
        factor *= 1.125
        degrees = np.minimum(np.ceil(least * factor).astype(np.int64), most)
        seconds = cost.ring_piece_seconds(lengths, degrees)
        better = seconds < best_seconds
        best, best_seconds = np.where(better, degrees, best), np.where(better, seconds, best_seconds)
    return best


def most_degrees(
    lengths: NDArray[np.int64], least: NDArray[np.int64], ranks: int, floor_tokens: int
) -> NDArray[np.int64]:
    """Tell how far growth may go: it leaves about `floor_tokens` on a rank, and never undoes what memory needs."""
    return np.minimum(np.maximum(least, lengths // floor_tokens), ranks)


def grown_degrees(
    cost: Cost,
    lengths: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    seconds: float,
    *,
    only: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Choose degrees for a schedule in which no sequence should take longer than `seconds`.

    A sequence that cannot be that quick gets its quickest degree. `only`: the degrees to choose from (default: all).
    """
    return degree_growth(cost, lengths, least, most, only=only)(seconds)


def degree_growth(
    cost: Cost,
    lengths: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    *,
    only: NDArray[np.int64] | None = None,
) -> Growth:
    """Return `grown_degrees` of these sequences as a function of `seconds`, for who asks again and again."""
    search = degree_search(cost, lengths, least, most, only=only)
    quickest = np.zeros(len(lengths), dtype=np.int64)  # 0: not asked for yet

    def grown(seconds: float) -> NDArray[np.int64]:
        degrees = search(seconds)
        slow = degrees > most
        new = slow & (quickest == 0)
        if np.any(new):
            quickest[new] = quickest_degrees(cost, lengths[new], least[new], most[new], only=only)
        return np.where(slow, quickest, degrees)

    return grown


def stacking_degrees(
    cost: Cost, lengths: NDArray[np.int64], degrees: NDArray[np.int64], most: NDArray[np.int64], seconds: float
) -> NDArray[np.int64]:
    """Widen rings so that two, three ... of them end together with one that takes `seconds`.

    A ring of 0.6 of the time leaves 0.4 that a second one does not fit into; cut a little further it takes 0.5. One of
    more than `_NEARLY_WHOLE` of its part stays as it is.
    """
    for parts in range(2, _MOST_STACKED + 1):
        took = cost.ring_piece_seconds(lengths, degrees) + cost.fixed_seconds
        between = (took > seconds / parts) & (took < _NEARLY_WHOLE * seconds / (parts - 1)) & (degrees > 1)
        if np.any(between):
            narrower = least_degrees(cost, lengths[between], degrees[between], most[between], seconds / parts)
            degrees = degrees.copy()
            degrees[between] = np.where(narrower <= most[between], narrower, degrees[between])
    return degrees


def filling_degrees(degrees: NDArray[np.int64], most: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Widen rings so that as many as fit side by side fill the line of ranks, where growth allows it.

    Of 64 ranks a ring of 40 would leave 24 idle or apart; over all 64 the same arithmetic ends sooner.
    """
    wider = ranks // (ranks // degrees)
    return np.where(wider <= most, wider, degrees)
