"""What moves and over what: links inside and between nodes, sweeps over the layers, how far a piece reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Numbers = Any  # a float, or an array of floats: the formulas of `terms` are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link: one rank's bytes a second in one direction, and the latency of a hop over all layers."""

    bytes_per_second: float
    hop_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sweep over all layers, as shares of what forward and backward do together."""

    attention: float
    linear: float
    ring: float
    exchange: float


class Reach(NamedTuple):
    """How far a piece reaches over nodes: all that its place has to do with its seconds.

    ring_near, groups_near: whether the ring, and each group that splits heads, is inside one node. flows: messages that
    leave the busiest of its nodes at once; told where nodes share uplinks, else 1.
    """

    ring_near: Numbers
    groups_near: Numbers
    flows: Numbers
