"""Which kind of recomputation a step takes, each with the capacity that memory leaves it.

What backward computes again need not be kept: a rank then holds several times the tokens, so sequences need fewer
ranks, or no ring at all, for a third more of forward work. The capacity is one number a plan, so it is one kind a step.
Every kind is planned and the plan that ends first is kept, the kind named first of equal ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner.api import plan_step
from lengthwise.planner.options import DEFAULT, PlanOptions


def plan_recomputed(
    tokens: Sequence[int], ranks: int, cost: Cost, capacities: Mapping[str, int], options: PlanOptions = DEFAULT
) -> Plan:
    """Plan one step with the kind of recomputation that ends first.

    Args:
        tokens: length of each sequence, as for `plan_step`.
        ranks: of the cluster.
        cost: what work takes.
        capacities: tokens that a rank holds, for each kind of recomputation to try.
        options: for `plan_step`; their own `recompute` does not count.

    Raises:
        ConfigError: as `plan_step` does.
        PlanError: as `plan_step` does, with the kind of the largest capacity; kinds that cannot hold a sequence which
            another one holds are not chosen.
    """
    plans: list[Plan] = []
    refused: dict[str, PlanError] = {}
    for kind, capacity in capacities.items():
        cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
        try:
            plans.append(plan_step(tokens, cluster, cost, replace(options, recompute=kind)))
        except PlanError as error:
            refused[kind] = error
    if not plans:
        raise refused[max(refused, key=lambda kind: capacities[kind])]
    return min(plans, key=lambda plan: float(plan.notes["predicted_seconds"]))
