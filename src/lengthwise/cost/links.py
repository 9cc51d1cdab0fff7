"""What `Cost` is made of: links, passes over the layers, how far a piece reaches, what a piece does and may choose."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
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
    leave the busiest of its nodes at once; counted where nodes share uplinks, else 1.
    """

    ring_near: Numbers
    groups_near: Numbers
    flows: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a piece does beside being cut; where many pieces are priced at once, an array has one entry a piece.

    heads: ranks of a group that splits heads; divides the degree and the model's heads.
    offload: ratio of the microbatch, 0 to 1.
    recompute: kind of the microbatch, one of `core.plan.RECOMPUTE_KINDS`.
    """

    heads: Numbers = 1
    offload: Numbers = 0.0
    recompute: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a planner may choose for each piece beside its degree.

    recompute: the kind of all microbatches.
    splits_heads: whether rings may split heads.
    offloads_above_tokens: the capacity, from which on a rank offloads; inf: it never does.
    layers: of the whole model, by which the plan file counts what stays on the device.
    """

    recompute: str = "none"
    splits_heads: bool = False
    offloads_above_tokens: float = inf
    layers: int = 1
