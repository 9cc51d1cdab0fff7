"""Plans x costs -> a timeline: what a step would take on machines that nobody here has. Pure: no torch, no clock."""

from lengthwise.simulator.answer import answer
from lengthwise.simulator.loading import LOADERS, loading_seconds, waits_seconds
from lengthwise.simulator.mesh_search import best_mesh, best_meshes, refuse_unheld
from lengthwise.simulator.meshes import (
    Best,
    Found,
    Question,
    RankMesh,
    on_one_mesh,
    stages_to_try,
    tensors_to_try,
)
from lengthwise.simulator.rounds import microbatch_clocks
from lengthwise.simulator.step import simulate_plan
from lengthwise.simulator.study import MODEL_ERROR, Gain, PlannerResult, Setting, compare_planners, gain_over, gain_text
from lengthwise.simulator.trace import chosen_ranks, chrome_trace
from lengthwise.simulator.ways import Answer, WayRow

__all__ = [
    "LOADERS",
    "MODEL_ERROR",
    "Answer",
    "Best",
    "Found",
    "Gain",
    "PlannerResult",
    "Question",
    "RankMesh",
    "Setting",
    "WayRow",
    "answer",
    "best_mesh",
    "best_meshes",
    "chosen_ranks",
    "chrome_trace",
    "compare_planners",
    "gain_over",
    "gain_text",
    "loading_seconds",
    "microbatch_clocks",
    "on_one_mesh",
    "refuse_unheld",
    "simulate_plan",
    "stages_to_try",
    "tensors_to_try",
    "waits_seconds",
]
