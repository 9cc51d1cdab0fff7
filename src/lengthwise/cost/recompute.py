"""What it costs that backward computes layers again: one more forward of what is not kept.

Forward is a third of the linear work and of the launches, two of the seven parts of attention's work (two products
forward, five backward), a quarter of a ring's bytes (keys and values in the compute type; backward sends these and
their gradients in fp32) and half of its hops. The output head is counted as if it were run again, though it is not.
`AllTermsCost` knows its passes and prices the second forward as one more of them.
"""

from __future__ import annotations

from dataclasses import replace

from lengthwise.cost.joint import JointCost
from lengthwise.cost.model import CostModel
from lengthwise.cost.protocol import Cost
from lengthwise.cost.terms import AllTermsCost

_LINEAR_SHARE, _ATTENTION_SHARE, _RING_SHARE, _HOP_SHARE = 1 / 3, 2 / 7, 1 / 4, 1 / 2


def forward_share(kind: str) -> float:
    """Tell which share of a microbatch's time is its first forward pass, by its linear work."""
    return _LINEAR_SHARE if kind == "none" else _LINEAR_SHARE / (1 + _LINEAR_SHARE)


def recompute_cost(cost: Cost, kind: str) -> Cost:
    """Return the costs of microbatches whose `recompute` is `kind`, from those of microbatches that keep everything."""
    if isinstance(cost, AllTermsCost):
        return JointCost(terms=cost, recompute=kind) if kind != "none" else cost
    if isinstance(cost, JointCost):
        return replace(cost, recompute=kind)
    if kind == "none" or not isinstance(cost, CostModel):
        return cost
    attends_again = kind == "layer"
    return replace(
        cost,
        linear_seconds=cost.linear_seconds * (1 + _LINEAR_SHARE),
        fixed_seconds=cost.fixed_seconds * (1 + _LINEAR_SHARE),
        quadratic_seconds=cost.quadratic_seconds * (1 + _ATTENTION_SHARE * attends_again),
        ring_seconds=cost.ring_seconds * (1 + _RING_SHARE * attends_again),
        hop_seconds=cost.hop_seconds * (1 + _HOP_SHARE * attends_again),
    )
