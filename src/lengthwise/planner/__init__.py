"""Lengths in, plan out: `plan_step` is the one entry. Pure: no torch, no processes, no clock.

The same lengths, cluster, costs and planner give the same plan, in any process and on any machine.
"""

from lengthwise.planner.api import MODES, PLANNERS, plan_step, read_options
from lengthwise.planner.exchange import split_heads
from lengthwise.planner.problem.bounds import bound_seconds
from lengthwise.planner.problem.score import Score, score
from lengthwise.planner.problem.speeds import parse_speeds
from lengthwise.planner.recomputation import plan_recomputed

__all__ = [
    "MODES",
    "PLANNERS",
    "Score",
    "bound_seconds",
    "parse_speeds",
    "plan_recomputed",
    "plan_step",
    "read_options",
    "score",
    "split_heads",
]
