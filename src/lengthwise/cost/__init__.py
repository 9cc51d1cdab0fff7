"""Seconds of a piece of work, and where they come from: a model's shape and a hardware description.

Pure: no torch, no devices. The planner asks `CostModel`; `analytic_cost` makes one with no machine at hand.
"""

from lengthwise.cost.analytic import analytic_cost
from lengthwise.cost.given import cost_from_file
from lengthwise.cost.hardware import HARDWARE_NAMES, Hardware, named_hardware
from lengthwise.cost.model import CostModel
from lengthwise.cost.shapes import SHAPE_NAMES, named_shape, shape_from_config

__all__ = [
    "HARDWARE_NAMES",
    "SHAPE_NAMES",
    "CostModel",
    "Hardware",
    "analytic_cost",
    "cost_from_file",
    "named_hardware",
    "named_shape",
    "shape_from_config",
]
