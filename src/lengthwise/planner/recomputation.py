"""Which kind of recomputation a step takes, each with the capacity that memory leaves it.

What backward computes again need not be kept: a rank then holds several times the tokens, so sequences need fewer
ranks, or no ring at all, for a third more of forward work. The capacity is one number a plan, so it is one kind a step.
The plan that ends first is kept, the kind named first of equal ones; a kind whose arithmetic alone, spread evenly over
all ranks, takes as long as the best plan before it is not planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choices, Cost
from lengthwise.planner.api import plan_step
from lengthwise.planner.options import DEFAULT, PlanOptions

PlanStep: TypeAlias = Callable[[Sequence[int], Cluster, Cost, PlanOptions], Plan]


def plan_recomputed(
    tokens: Sequence[int],
    ranks: int,
    cost: Cost,
    capacities: Mapping[str, int],
    options: PlanOptions = DEFAULT,
    *,
    plan_each: PlanStep = plan_step,
) -> Plan:
    """Plan one step with the kind of recomputation that ends first.

    Args:
        tokens: length of each sequence, as for `plan_step`.
        ranks: of the cluster.
        cost: what work takes.
        capacities: tokens that a rank holds, for each kind of recomputation to try.
        options: for `plan_step`; their own `recompute` does not count.
        plan_each: what plans with one kind, for who keeps plans.

    Raises:
        ConfigError: as `plan_step` does.
        PlanError: as `plan_step` does, with the kind of the largest capacity; kinds that cannot hold a sequence which
            another one holds are not chosen.
    """
    best: Plan | None = None
    least = inf
    refused: dict[str, PlanError] = {}
    for kind, capacity in capacities.items():
        if options.speeds is None and arithmetic_seconds(tokens, cost, kind) >= least * ranks:
            continue
        cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
        try:
            plan = plan_each(tokens, cluster, cost, replace(options, recompute=kind))
        except PlanError as error:
            refused[kind] = error
            continue
        if (seconds := float(plan.notes["predicted_seconds"])) < least:
            best, least = plan, seconds
    if best is None:
        raise refused[max(refused, key=lambda kind: capacities[kind])]
    return best


def arithmetic_seconds(tokens: Sequence[int], cost: Cost, recompute: str) -> float:
    """Return the arithmetic of a step with a kind of recomputation: all ranks together take no less."""
    priced = cost.choosing(Choices(recompute=recompute, layers=max(1, cost.layers)))
    return float(priced.compute_seconds(np.array(tokens, dtype=np.int64)).sum())
