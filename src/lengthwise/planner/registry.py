"""Which planners there are, by name.

A new planner is one function from a request to microbatches: one file in `baselines`, if it is not ours, and one line
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from lengthwise.core.plan import Microbatch
from lengthwise.planner.baselines.bytescale import plan_bytescale
from lengthwise.planner.baselines.bytescale_naive import plan_bytescale_naive
from lengthwise.planner.baselines.power_of_two import plan_power_of_two
from lengthwise.planner.baselines.single_degree import plan_single_degree
from lengthwise.planner.baselines.static import plan_static
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.search import plan_lengthwise

Planner: TypeAlias = Callable[[PlanRequest], list[Microbatch]]

_BUILT_IN: Mapping[str, Planner] = {
    "lengthwise": plan_lengthwise,
    "static": plan_static,
    "single-degree": plan_single_degree,
    "bytescale-naive": plan_bytescale_naive,
    "bytescale": plan_bytescale,
    "power-of-two": plan_power_of_two,
}
PLANNERS = tuple(_BUILT_IN)
BASELINES = (plan_single_degree, plan_static, plan_bytescale, plan_bytescale_naive, plan_power_of_two)


def planner_names() -> tuple[str, ...]:
    """Return all names that `PlanOptions.planner` may have."""
    return PLANNERS


def find_planner(name: str) -> Planner:
    """Return the planner of a name among `planner_names()`."""
    return _BUILT_IN[name]
