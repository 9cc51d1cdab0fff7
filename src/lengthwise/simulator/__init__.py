"""Simulates steps on machines that need not exist here: from a plan and costs to a timeline. No torch, no clock."""

from lengthwise.simulator.branches import Branches
from lengthwise.simulator.clocks import simulate_plan
from lengthwise.simulator.comparison import LAYOUTS, OURS, POWERS, Comparison, auto_layout, compare, compare_layouts
from lengthwise.simulator.found import Found, run_batches
from lengthwise.simulator.gains import MODEL_ERROR, Gain, gain_over
from lengthwise.simulator.mesh_search import Best, best_mesh, refuse_unheld
from lengthwise.simulator.meshes import RankMesh, Scenario, Setting
from lengthwise.simulator.rounds import microbatch_clocks
from lengthwise.simulator.trace import Stretch, chosen_ranks, chrome_trace, stretches

__all__ = [
    "LAYOUTS",
    "MODEL_ERROR",
    "OURS",
    "POWERS",
    "Best",
    "Branches",
    "Comparison",
    "Found",
    "Gain",
    "RankMesh",
    "Scenario",
    "Setting",
    "Stretch",
    "auto_layout",
    "best_mesh",
    "chosen_ranks",
    "chrome_trace",
    "compare",
    "compare_layouts",
    "gain_over",
    "microbatch_clocks",
    "refuse_unheld",
    "run_batches",
    "simulate_plan",
    "stretches",
]
