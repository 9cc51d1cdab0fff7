"""The one entry of the planner: lengths, cluster, costs and options in, a plan out."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner.baselines.single_degree import PACKED_DP, refuse_cut
from lengthwise.planner.options import DEFAULT, PlanOptions
from lengthwise.planner.portfolio import choose_plan
from lengthwise.planner.problem.bounds import has_lone_rings, shares_launches_only
from lengthwise.planner.problem.choices import CHOICES
from lengthwise.planner.problem.lengths import read_tokens, refuse_unheld
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.speeds import at_mean_speed, speed_runs


def plan_step(tokens: Sequence[int], cluster: Cluster, cost: Cost, options: PlanOptions = DEFAULT) -> Plan:
    """Plan one optimizer step.

    Args:
        tokens: length of each sequence of the global batch, in tokens.
        cluster: ranks, and the tokens that one of them holds in one microbatch.
        cost: what work takes; its version is noted in the plan.
        options: how to plan.

    Returns:
        A plan whose notes hold planner, predicted_seconds (the makespan), bound_seconds and cost (the version),
        and speeds where they are not all 1.

    Raises:
        ConfigError: an argument of another kind, two that are swapped for example; or what `PlanOptions.checked`
            refuses.
        PlanError: no sequences, a length below 1, or sequences that the cluster cannot hold (all of them named).
        Problems: several of these.
    """
    _refuse_mistaken(tokens=tokens, cluster=cluster, cost=cost, options=options)
    asked = options.checked(cluster.ranks, cost)
    lengths, paces = read_tokens(tokens), asked.speeds
    widest, relative = at_mean_speed(cost.choosing(asked.choices(cluster.capacity_tokens)), paces)
    held_tokens = widest.most_held_tokens(cluster.capacity_tokens)
    refuse_unheld(lengths, replace(cluster, capacity_tokens=held_tokens))
    if asked.planner == PACKED_DP:
        refuse_cut(lengths, held_tokens)
    request = PlanRequest(
        tokens=lengths,
        cluster=cluster,
        cost=widest,
        context_tokens=asked.context_tokens,
        speeds=relative,
        stages=asked.stages or 1,
        virtual=asked.virtual or 1,
        planning_share=asked.planning_share,
    )
    chosen = choose_plan(request, cost, asked)
    if asked.heads not in CHOICES:  # a group of a number may be quicker than none; no split is quicker than the best
        request = replace(request, cost=replace(widest, choices=replace(widest.choices, splits_heads=True)))
    bound = _bound_of(chosen.plan, request)
    bound = request.in_waves(bound) if asked.mode == "waves" else bound
    notes = {"planner": asked.planner, "predicted_seconds": chosen.seconds, "bound_seconds": bound}
    unequal = {} if paces is None else {"speeds": speed_runs(paces)}
    return replace(chosen.plan, notes={**notes, "cost": cost.version, **unequal})


def _refuse_mistaken(**arguments: object) -> None:
    """Refuse arguments of `plan_step` that are not what their names say, all of them at once."""
    kinds = {"tokens": (Collection, "lengths of sequences"), "cluster": (Cluster, "a Cluster")}
    kinds |= {"cost": (Cost, "a Cost"), "options": (PlanOptions, "PlanOptions")}
    remedy = "Give lengths, cluster, cost and options, in this order."
    problems = [
        ConfigError(name, expected=expected, got=reprlib.repr(arguments[name]), remedy=remedy)
        for name, (kind, expected) in kinds.items()
        if not isinstance(arguments[name], kind) or isinstance(arguments[name], Set | Mapping)  # equal lengths are lost
    ]
    raise_problems(problems)


def _bound_of(plan: Plan, request: PlanRequest) -> float:
    """Find the highest bound that holds for plans of this kind."""
    if has_lone_rings(plan):
        kind, bound = {}, request.bound_seconds
    elif shares_launches_only(plan):
        kind, bound = {"shared_launches": True}, request.shared_bound_seconds
    else:
        kind, bound = {"lone_rings": False}, request.least_seconds(lone_rings=False)
    if request.priced_stages == 1:
        return bound
    return max(bound, request.least_seconds(**kind, stages=request.priced_stages))
