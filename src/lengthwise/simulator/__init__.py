"""Plans x costs -> a timeline: what a step would take on machines that nobody here has. Pure: no torch, no clock."""

from lengthwise.simulator.loading import LOADERS, loading_seconds, waits_seconds
from lengthwise.simulator.rounds import microbatch_clocks
from lengthwise.simulator.step import simulate_plan
from lengthwise.simulator.study import PlannerResult, Setting, compare_planners
from lengthwise.simulator.trace import chosen_ranks, chrome_trace

__all__ = [
    "LOADERS",
    "PlannerResult",
    "Setting",
    "chosen_ranks",
    "chrome_trace",
    "compare_planners",
    "loading_seconds",
    "microbatch_clocks",
    "simulate_plan",
    "waits_seconds",
]
