"""Plans x costs -> a timeline: what a step would take on machines that nobody here has. Pure: no torch, no clock."""

from lengthwise.simulator.rounds import MicrobatchClocks, microbatch_clocks
from lengthwise.simulator.stages import PieceStages, piece_stages
from lengthwise.simulator.step import simulate_plan
from lengthwise.simulator.study import PlannerResult, Setting, SimulatedStep, compare_planners
from lengthwise.simulator.timeline import Timeline
from lengthwise.simulator.trace import chosen_ranks, chrome_trace

__all__ = [
    "MicrobatchClocks",
    "PieceStages",
    "PlannerResult",
    "Setting",
    "SimulatedStep",
    "Timeline",
    "chosen_ranks",
    "chrome_trace",
    "compare_planners",
    "microbatch_clocks",
    "piece_stages",
    "simulate_plan",
]
