"""Seconds and bytes of a piece of work, from a model's shape and a hardware description or measurements. Pure.

Planners, score and simulator ask a `Cost`; `memory` says what a step holds, `capacity` how many tokens fit.
"""

from lengthwise.cost.all_terms import all_terms_cost
from lengthwise.cost.analytic import analytic_cost, step_flops
from lengthwise.cost.capacity import (
    RESERVED,
    STEP_TOKENS,
    memory_of,
    mixed_capacity,
    recompute_capacities,
    step_memory,
)
from lengthwise.cost.choices import Choice, Choices
from lengthwise.cost.costs import costs
from lengthwise.cost.ending import is_mostly_overhead
from lengthwise.cost.hardware import HARDWARE_NAMES, Hardware, hardware_of_gpu, named_hardware
from lengthwise.cost.layout import ModelLayout, ranks_of_node
from lengthwise.cost.links import Link
from lengthwise.cost.memory import (
    DTYPE_BYTES,
    StepMemory,
    logits_at_once,
    loss_bytes,
)
from lengthwise.cost.microbatch import (
    WINDOW_LAYERS,
    LongKernelBytes,
    MicrobatchBytes,
    Moments,
    PassBeside,
    StepBytes,
)
from lengthwise.cost.passes import PassShares
from lengthwise.cost.plain import plain_cost
from lengthwise.cost.shapes import SHAPE_NAMES, check_trained, layer_shapes, named_shape, shape_from_config
from lengthwise.cost.shard_choice import (
    ZERO3_ALONE,
    LayoutSeconds,
    check_host,
    choose_shard,
    laid_cost,
    offloaded_cost,
    sharded_cost,
    sharded_traffic,
    wanted_tokens,
)
from lengthwise.cost.terms import Cost
from lengthwise.cost.trees import Tree, folded, lengths_of

__all__ = [
    "DTYPE_BYTES",
    "HARDWARE_NAMES",
    "RESERVED",
    "SHAPE_NAMES",
    "STEP_TOKENS",
    "WINDOW_LAYERS",
    "ZERO3_ALONE",
    "Choice",
    "Choices",
    "Cost",
    "Hardware",
    "LayoutSeconds",
    "Link",
    "LongKernelBytes",
    "MicrobatchBytes",
    "ModelLayout",
    "Moments",
    "PassBeside",
    "PassShares",
    "StepBytes",
    "StepMemory",
    "Tree",
    "all_terms_cost",
    "analytic_cost",
    "check_host",
    "check_trained",
    "choose_shard",
    "costs",
    "folded",
    "hardware_of_gpu",
    "is_mostly_overhead",
    "laid_cost",
    "layer_shapes",
    "lengths_of",
    "logits_at_once",
    "loss_bytes",
    "memory_of",
    "mixed_capacity",
    "named_hardware",
    "named_shape",
    "offloaded_cost",
    "plain_cost",
    "ranks_of_node",
    "recompute_capacities",
    "shape_from_config",
    "sharded_cost",
    "sharded_traffic",
    "step_flops",
    "step_memory",
    "wanted_tokens",
]
