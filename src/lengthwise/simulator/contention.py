"""Microbatches that run at one time and share a node's uplink: the slowdown of their far links.

Traffic is a fluid (docs/decisions/uplinks-as-a-fluid.md): while microbatches together need more than an uplink carries,
their links slow down by that ratio. A microbatch gets its mean ratio at its worst node, and clocks are run again, three
times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lengthwise.core.plan import Microbatch, Plan
from lengthwise.cost import Cost
from lengthwise.cost.links import Floats

TURNS = 3


def node_bytes(microbatch: Microbatch, tokens: Sequence[int], cost: Cost) -> dict[int, float]:
    """Count the bytes that rings and sweeps of a microbatch send out of each node, all layers and passes.

    The same number comes in. In a sweep each rank sends its maps to the one before it.
    """
    total: dict[int, float] = defaultdict(float)
    passes = sum(each.ring for each in cost.passes(microbatch.recompute))
    for piece in microbatch.pieces:
        positions, nodes = piece.degree // piece.heads, np.array(piece.ranks) // cost.ranks_per_node
        for node in nodes[1:][nodes[1:] != nodes[:-1]].tolist() if cost.sweep_bytes else ():
            total[node] += cost.sweep_bytes * len(piece.sequences)
        if positions == 1:
            continue
        passed = sum(tokens[i] for i in piece.sequences) * (positions - 1) / positions
        repeated = max(1.0, piece.heads / cost.kv_heads) / piece.heads
        edge_bytes = passes * cost.ring_bytes * passed * repeated
        for node in nodes[nodes != np.roll(nodes, -piece.heads)].tolist():
            total[node] += edge_bytes
    return dict(total)


class Uplinks:
    """Traffic of a plan's microbatches on the uplinks; entry i of `slowdowns` is the factor of i's far links."""

    def __init__(self, plan: Plan, alone_seconds: Sequence[float], cost: Cost) -> None:
        self._cost = cost
        self.slowdowns = np.ones(len(plan.microbatches))
        self._rates: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for index, (microbatch, seconds) in enumerate(zip(plan.microbatches, alone_seconds, strict=True)):
            for node, size in node_bytes(microbatch, plan.tokens, cost).items():
                self._rates[node].append((index, size / seconds))

    def slow_down(self, starts: Floats, ends: Floats) -> bool:
        """Raise the slowdowns to those of microbatches i from `starts[i]` to `ends[i]`; return whether any rose."""
        before = self.slowdowns.copy()
        for asked in self._rates.values():
            which = np.array([index for index, _ in asked])
            rates = np.array([rate for _, rate in asked])
            ratios = _mean_ratios(starts[which], ends[which], rates / self._cost.uplink_bytes_per_second)
            np.maximum.at(self.slowdowns, which, ratios)
        return bool(np.any(self.slowdowns > before))

    def slowed(self, index: int) -> Cost:
        """Return the costs of a microbatch with slowed far links and share of the uplinks."""
        far, slowdown = self._cost.far, float(self.slowdowns[index])
        link = replace(far, bytes_per_second=far.bytes_per_second / slowdown)
        return replace(self._cost, far=link, uplink_bytes_per_second=self._cost.uplink_bytes_per_second / slowdown)


def _mean_ratios(starts: Floats, ends: Floats, shares: Floats) -> Floats:
    """Return per span the mean of (load of all spans / capacity of the uplink) over it, at least 1."""
    borders = np.unique(np.concatenate((starts, ends)))
    change = np.zeros(len(borders))
    first, last = np.searchsorted(borders, starts), np.searchsorted(borders, ends)
    np.add.at(change, first, shares)
    np.add.at(change, last, -shares)
    ratio = np.maximum(1.0, np.cumsum(change))
    passed = np.concatenate(([0.0], np.cumsum(ratio[:-1] * np.diff(borders))))
    return (passed[last] - passed[first]) / np.maximum(ends - starts, 1e-300)
