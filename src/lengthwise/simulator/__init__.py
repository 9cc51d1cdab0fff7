"""Plans x costs -> a timeline: what a step would take on machines that nobody here has. Pure: no torch, no clock."""

from lengthwise.core.timeline import Timeline
from lengthwise.simulator.contention import node_bytes
from lengthwise.simulator.loading import LOADERS, loading_seconds, waits_seconds
from lengthwise.simulator.piece_layers import PieceLayer, piece_layer
from lengthwise.simulator.rounds import MicrobatchClocks, microbatch_clocks
from lengthwise.simulator.step import simulate_plan
from lengthwise.simulator.study import PlannerResult, Setting, SimulatedStep, compare_planners
from lengthwise.simulator.trace import chosen_ranks, chrome_trace

__all__ = [
    "LOADERS",
    "MicrobatchClocks",
    "PieceLayer",
    "PlannerResult",
    "Setting",
    "SimulatedStep",
    "Timeline",
    "chosen_ranks",
    "chrome_trace",
    "compare_planners",
    "loading_seconds",
    "microbatch_clocks",
    "node_bytes",
    "piece_layer",
    "simulate_plan",
    "waits_seconds",
]
