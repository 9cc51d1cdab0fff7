"""The bound of a plan's own kind, for plans that `plan_step` did not make or whose schedule was changed afterwards.

Plans of `plan_step` hold it in their notes. What no plan can beat depends on what plans of a kind may do
(docs/decisions/bound-by-kind.md): a plan that is divided by the bound of another kind may look better than it is, or
end before what "cannot be beaten".
"""

from __future__ import annotations

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner.problem.bounds import has_lone_rings, shares_launches_only
from lengthwise.planner.problem.request import PlanRequest


def own_bound_seconds(plan: Plan, cost: Cost) -> float:
    """Return the highest bound, in seconds, that holds for plans of this kind and schedule.

    Args:
        plan: without offload, split heads or recomputation of its own.
        cost: what its work takes; in a pipeline that of one stage. All ranks are of one speed.
    """
    request = PlanRequest(
        tokens=plan.tokens,
        cluster=Cluster(ranks=plan.ranks, capacity_tokens=plan.capacity),
        cost=cost,
        stages=plan.schedule.get("stages", 1),
        virtual=plan.schedule.get("virtual", 1),
    )
    lone, shared = has_lone_rings(plan), shares_launches_only(plan)
    if lone:
        flat = request.bound_seconds
    elif shared:
        flat = request.shared_bound_seconds
    else:
        flat = request.least_seconds(lone_rings=False)
    if request.priced_stages == 1:
        return flat
    staged = request.least_seconds(
        lone_rings=lone or shared, shared_launches=shared and not lone, stages=request.priced_stages
    )
    return max(flat, staged)
