"""Seconds of a piece of work, and where they come from: a model's shape and a hardware description.

Pure: no torch, no devices. Planners ask a `Cost`: `CostModel`, five coefficients, or `AllTermsCost`, with two kinds of
link, block sizes, heads, offload and recomputation, or `JointCost`, which chooses those. `analytic_cost` and
`all_terms_cost` make them with no machine at hand; `memory` tells how many tokens fit.
"""

from lengthwise.cost.all_terms import all_terms_cost
from lengthwise.cost.analytic import analytic_cost, step_flops
from lengthwise.cost.costs import costs
from lengthwise.cost.given import cost_from_file
from lengthwise.cost.hardware import HARDWARE_NAMES, Hardware, named_hardware
from lengthwise.cost.joint import JointCost
from lengthwise.cost.links import Link, Pass
from lengthwise.cost.memory import (
    activation_bytes,
    capacity_tokens,
    host_share_bytes,
    microbatches_kept,
    recompute_capacities,
    state_bytes,
)
from lengthwise.cost.model import CostModel
from lengthwise.cost.protocol import Cost, RingCost
from lengthwise.cost.recompute import forward_share, recompute_cost
from lengthwise.cost.shapes import SHAPE_NAMES, named_shape, shape_from_config
from lengthwise.cost.terms import AllTermsCost

__all__ = [
    "HARDWARE_NAMES",
    "SHAPE_NAMES",
    "AllTermsCost",
    "Cost",
    "CostModel",
    "Hardware",
    "JointCost",
    "Link",
    "Pass",
    "RingCost",
    "activation_bytes",
    "all_terms_cost",
    "analytic_cost",
    "capacity_tokens",
    "cost_from_file",
    "costs",
    "forward_share",
    "host_share_bytes",
    "microbatches_kept",
    "named_hardware",
    "named_shape",
    "recompute_capacities",
    "recompute_cost",
    "shape_from_config",
    "state_bytes",
    "step_flops",
]
