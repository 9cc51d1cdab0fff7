"""Lengths in, plan out: `plan_step` is the one entry. Pure: no torch, no processes, no clock.

The same lengths, cluster, costs and planner give the same plan, in any process and on any machine.
"""

from lengthwise.planner.bounds import bound_seconds
from lengthwise.planner.check import check_plan
from lengthwise.planner.exchange import split_heads
from lengthwise.planner.recipes import RECIPES, draw_lengths, lengths_from_file
from lengthwise.planner.recomputation import plan_recomputed
from lengthwise.planner.rings import ring_order
from lengthwise.planner.score import Score, score
from lengthwise.planner.speeds import parse_speeds
from lengthwise.planner.step import MODES, PLANNERS, plan_step, read_options

__all__ = [
    "MODES",
    "PLANNERS",
    "RECIPES",
    "Score",
    "bound_seconds",
    "check_plan",
    "draw_lengths",
    "lengths_from_file",
    "parse_speeds",
    "plan_recomputed",
    "plan_step",
    "read_options",
    "ring_order",
    "score",
    "split_heads",
]
