"""Planners of others that no package here installs by itself, by name: FlexSP's program, Megatron-Core's scheduler.

`register_others()` makes them known to `plan_step` and `compare_planners` of this process. `flexsp` solves steps of at
most `MOST_CELLS` ranks x sequences, what takes some seconds of one core, under costs without links, and refuses others.
`megatron-core` is there where Megatron-Core is installed: its own sub-batches, packed as `power-of-two` packs.
"""

from __future__ import annotations

from exact.flexsp import plan_flexsp
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch
from lengthwise.planner import PlanRequest, register_planner
from megatron_core import load_scheduler, plan_megatron

FLEXSP, MEGATRON = "flexsp", "megatron-core"
MOST_CELLS = 96  # ranks x sequences: 0.7 to 7.5 s of a core, github lengths on 4 and 8 ranks, 2026-11-23


def register_others() -> tuple[str, ...]:
    """Register those that can run here; return their names."""
    register_planner(FLEXSP, plan_small_flexsp)
    try:
        scheduler = load_scheduler()
    except ImportError:
        return (FLEXSP,)
    register_planner(MEGATRON, lambda request: plan_megatron(scheduler, request))
    return FLEXSP, MEGATRON


def plan_small_flexsp(request: PlanRequest) -> list[Microbatch]:
    """Plan a step that the program solves in seconds.

    Raises:
        PlanError: a larger one, or costs with links.
    """
    ranks, sequences = request.cluster.ranks, len(request.tokens)
    if ranks * sequences > MOST_CELLS or request.cost.prices_choices:
        links = " and costs with links" if request.cost.prices_choices else ""
        raise PlanError(
            FLEXSP,
            expected=f"a step that is solved in 10 s: at most {MOST_CELLS} ranks x sequences, and costs without links",
            got=f"{ranks} ranks x {sequences} sequences{links}",
            remedy="Compare larger steps with the other planners.",
        )
    return plan_flexsp(request)
