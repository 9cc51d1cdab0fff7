"""Whole plans of simpler structures, made where the search of `lengthwise` ends above the bound.

Rings of one sequence and packs on one rank are the best material where there is enough of it to level. A handful of
sequences, capacities of a few tokens, or launches that cost more than the work can ask for something else: packs cut
over rings of one degree (`single_degree`, `static`), or the fewest ranks and launches (`bytescale`). These planners are
baselines; here their plans are candidates like any other, so that a user never loses by asking for `lengthwise`. Of 250
random steps with wild costs each of them ended earlier on some, by up to 1.2x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lengthwise.core.plan import Microbatch
from lengthwise.cost import JointCost
from lengthwise.planner.baselines.bytescale import plan_bytescale
from lengthwise.planner.baselines.bytescale_naive import plan_bytescale_naive
from lengthwise.planner.baselines.power_of_two import plan_power_of_two
from lengthwise.planner.baselines.single_degree import plan_single_degree
from lengthwise.planner.baselines.static import plan_static
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.score import score
from lengthwise.planner.schedules.waves import plan_waves

_RIVALS: tuple[Callable[[PlanRequest], list[Microbatch]], ...] = (
    plan_single_degree,
    plan_static,
    plan_bytescale,
    plan_bytescale_naive,
    plan_power_of_two,
    plan_waves,  # a plan in lock-step is one of the free kind too, and ends no later without the lock
)
_CLOSE, _FAR = 1.0006, 1.01  # of the bound, below which small and larger steps are left as they are
_SMALL, _LARGER = 50_000, 1_000_000  # sequences x ranks, up to which rivals are made, in tens and hundreds of ms


def is_worth_rivals(request: PlanRequest, makespan_seconds: float) -> bool:
    """Tell whether other plans could end enough earlier to be worth making."""
    size = len(request.tokens) * request.cluster.ranks
    later = isinstance(request.cost, JointCost) or request.priced_stages > 1  # compared with choices and stages written
    if size > _LARGER or later:
        return False
    close = _CLOSE if size <= _SMALL else _FAR
    if makespan_seconds > request.bound_seconds * close:
        return True
    return size <= _SMALL and makespan_seconds > request.packed_bound_seconds * close


def rival_plans(request: PlanRequest) -> Iterator[list[Microbatch]]:
    """Yield the plans of the other planners."""
    free_context = replace(request, context_tokens=None)  # the mesh of this step, not of a whole run
    is_large = len(request.tokens) * request.cluster.ranks > _LARGER
    return (rival(free_context) for rival in _RIVALS if not (is_large and rival is plan_waves))  # which takes seconds


def best_of_rivals(
    request: PlanRequest, microbatches: list[Microbatch], makespan_seconds: float
) -> tuple[list[Microbatch], float]:
    """Return the plan that ends first, and when: the one given, or one of another structure that ends earlier."""
    best, best_seconds = microbatches, makespan_seconds
    for other in rival_plans(request):
        seconds = score(request.draft(other), request.cost, speeds=request.speeds).makespan_seconds
        if seconds < best_seconds * (1 - 1e-9):
            best, best_seconds = other, seconds
    return best, best_seconds
