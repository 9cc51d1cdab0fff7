"""Lengths in, plan out; `plan_step` is the one entry. Pure: no torch, no processes, no clock.

The same lengths, cluster, costs and planner give the same plan in any process and on any machine.
"""

from lengthwise.core.sizes import PLANNING_SHARE
from lengthwise.planner.baselines.single_degree import PACKED_DP
from lengthwise.planner.entry import PlanStep, arithmetic_seconds, plan_recomputed, plan_step, with_mixes
from lengthwise.planner.plan_options import PlanOptions, options_of
from lengthwise.planner.problem.bounds import bound_seconds
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.score import Score, score
from lengthwise.planner.registry import CUTTING_PLANNERS, PLANNERS, planner_names, register_planner

__all__ = [
    "CUTTING_PLANNERS",
    "PACKED_DP",
    "PLANNERS",
    "PLANNING_SHARE",
    "PlanOptions",
    "PlanRequest",
    "PlanStep",
    "Score",
    "arithmetic_seconds",
    "bound_seconds",
    "options_of",
    "plan_recomputed",
    "plan_step",
    "planner_names",
    "register_planner",
    "score",
    "with_mixes",
]
