"""Links between ranks, and how far over nodes a piece reaches: all that its place means for its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Numbers = Any  # a float or an array of floats, for which the formulas are the same


def chosen(condition: Numbers, one: Numbers, other: Numbers) -> Numbers:
    """Return `np.where`, quickly if the condition is not an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link: bytes per second of one rank in one direction, and latency of a ring step over all layers."""

    bytes_per_second: float
    hop_seconds: float = 0.0


class Reach(NamedTuple):
    """The reach of a piece over nodes.

    ring_near, groups_near: True if the ring, or each group that splits heads, is inside one node.
    flows: number of messages that leave its busiest node at once, if nodes share uplinks; else 1.
    far_rounds: number of rounds of a sweep of states, from its first rank to its last, with messages between nodes.
    """

    ring_near: Numbers
    groups_near: Numbers
    flows: Numbers
    far_rounds: Numbers


def crosses_node(ranks: Sequence[int], ranks_per_node: int) -> bool:
    """Return whether these ranks are in more than one node."""
    return min(ranks) // ranks_per_node != max(ranks) // ranks_per_node


def reach_of(ranks: Sequence[int], heads: int, ranks_per_node: int, *, shares_uplinks: bool) -> Reach:
    """Return the reach of a ring over `ranks`, in ring order; each `heads` neighbours split heads."""
    ring_near = not crosses_node(ranks, ranks_per_node)
    groups = (ranks[first : first + heads] for first in range(0, len(ranks), heads))
    groups_near = heads == 1 or not any(crosses_node(group, ranks_per_node) for group in groups)
    far_rounds = 0 if ring_near else int(count_far_rounds(np.array(ranks) // ranks_per_node))
    if ring_near or not shares_uplinks:
        return Reach(ring_near, groups_near, 1, far_rounds)
    # Messages that leave or enter the busiest node at once: all of a group send if any of it must.
    nodes = np.array(ranks).reshape(-1, heads) // ranks_per_node
    into = np.roll(nodes, -1, axis=0)
    far = np.any(nodes != into, axis=1)
    flows = max(int(np.unique(each[far], return_counts=True)[1].max(initial=1)) for each in (nodes, into))
    return Reach(ring_near, groups_near, flows, far_rounds)


def count_far_rounds(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often pieces change node, from the nodes of their ranks in ring order along the last axis."""
    return np.count_nonzero(nodes[..., 1:] != nodes[..., :-1], axis=-1)


def least_reach(
    degree: Numbers, heads: Numbers, ranks_per_node: int, *, crosses: bool, shares_uplinks: bool, sweeps: bool
) -> Reach:
    """Return the reach of pieces that are in as few nodes as possible, or, if `crosses`, in one more.

    degree, heads: numbers, or arrays with one entry per piece. A ring passes every border once each way, a sweep at
    least once; without `sweeps` their rounds are not counted.
    """
    inside = 1 if crosses else ranks_per_node
    is_near, flows, borders = degree <= inside, 1, 0
    if shares_uplinks or sweeps:
        borders = np.minimum(-(-degree // ranks_per_node) - 1 + crosses, degree - 1)
    if shares_uplinks:
        flows = np.maximum(1, np.minimum(ranks_per_node, heads * np.minimum(2, borders)))
    return Reach(is_near, is_near | (heads <= inside), flows, borders)
