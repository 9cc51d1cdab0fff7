"""The one entry of the planner: lengths, cluster, costs and options in, a plan out."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from typing import TypeAlias

import numpy as np

from lengthwise.core.errors import ConfigError, PlanError, raise_problems
from lengthwise.core.plan import STRONGER, Plan, kinds_by_layer
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choices, Cost, mixed_capacity
from lengthwise.planner.baselines.single_degree import PACKED_DP, refuse_cut
from lengthwise.planner.plan_options import CHOICES, DEFAULT, PlanOptions
from lengthwise.planner.portfolio import choose_plan
from lengthwise.planner.problem.bounds import has_lone_rings, shares_launches_only
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.speeds import at_mean_speed, speed_runs
from lengthwise.planner.problem.step_lengths import read_tokens, refuse_unheld


def plan_step(tokens: Sequence[int], cluster: Cluster, cost: Cost, options: PlanOptions = DEFAULT) -> Plan:
    """Plan one optimizer step.

    Args:
        tokens: length of each sequence of the global batch, in tokens.
        cluster: ranks, and the tokens that each holds in one microbatch.
        cost: costs of work; the plan notes their version.
        options: settings of the plan.

    Returns:
        A plan with notes: planner, predicted_seconds (the makespan), bound_seconds, cost (their version), and
        speeds if they are not all 1.

    Raises:
        ConfigError: an argument of a wrong type, or an option that `PlanOptions.checked` refuses.
        PlanError: no sequences, a length below 1, or sequences that the cluster cannot hold (all are named).
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
    if asked.heads not in CHOICES:  # groups of a given size may beat no split; none beats the best split
        request = replace(request, cost=replace(widest, choices=replace(widest.choices, splits_heads=True)))
    bound = _bound_of(chosen.plan, request)
    bound = request.in_waves(bound) if asked.mode == "waves" else bound
    notes = {"planner": asked.planner, "predicted_seconds": chosen.seconds, "bound_seconds": bound}
    unequal = {} if paces is None else {"speeds": speed_runs(paces)}
    return replace(chosen.plan, notes={**notes, "cost": cost.version, **unequal})


def _refuse_mistaken(**arguments: object) -> None:
    kinds = {"tokens": (Collection, "lengths of sequences"), "cluster": (Cluster, "a Cluster")}
    kinds |= {"cost": (Cost, "a Cost"), "options": (PlanOptions, "PlanOptions")}
    remedy = "Give lengths, cluster, cost and options, in this order."
    problems = [
        ConfigError(name, expected=expected, got=reprlib.repr(arguments[name]), remedy=remedy)
        for name, (kind, expected) in kinds.items()
        if not isinstance(arguments[name], kind) or isinstance(arguments[name], Set | Mapping)  # sets lose lengths
    ]
    raise_problems(problems)


def _bound_of(plan: Plan, request: PlanRequest) -> float:
    if has_lone_rings(plan):
        kind, bound = {}, request.bound_seconds
    elif shares_launches_only(plan):
        kind, bound = {"shared_launches": True}, request.shared_bound_seconds
    else:
        kind, bound = {"lone_rings": False}, request.least_seconds(lone_rings=False)
    if request.priced_stages == 1:
        return bound
    return max(bound, request.least_seconds(**kind, cut=replace(request.cut, stages=request.priced_stages)))


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
    """Plan one step with the recomputation that ends first, the same for the whole step.

    Activations that backward recomputes are not kept, so sequences need fewer ranks, for a third more work.
    Kinds whose arithmetic alone takes as long as the best plan so far are not planned. Mixes are planned without
    offload.

    Args:
        tokens: length of each sequence, in tokens.
        ranks: number of ranks.
        cost: the costs of work.
        capacities: tokens that a rank holds, for each kind of recomputation, or mix, to try.
        options: options of `plan_step`; their `recompute` is ignored.
        plan_each: function that plans with one kind (default: `plan_step`).

    Raises:
        ConfigError, PlanError: from `plan_step`, with the kind of the largest capacity.
    """
    best: Plan | None = None
    least = inf
    refused: dict[str, PlanError] = {}
    for kind, capacity in capacities.items():
        if options.speeds is None and arithmetic_seconds(tokens, cost, kind) >= least * ranks:
            continue
        cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
        try:
            offload = "off" if kinds_by_layer(kind).number else options.offload
            plan = plan_each(tokens, cluster, cost, replace(options, recompute=kind, offload=offload))
        except PlanError as error:
            refused[kind] = error
            continue
        if (seconds := float(plan.notes["predicted_seconds"])) < least:
            best, least = plan, seconds
    if best is None:
        raise refused[max(refused, key=lambda kind: capacities[kind])]
    return best


def with_mixes(capacities: Mapping[str, int], longest: int, ranks: int, options: PlanOptions) -> dict[str, int]:
    """Add mixes of two kinds, with which the longest sequence fits on fewer ranks than with the weaker kind.

    For each kind one mix at most, on the most such ranks; none in pipelines, whose stages have other layers each.
    """
    found = dict(capacities)
    for kind, held in capacities.items():
        fewer = min(ranks, -(-longest // held) - 1)
        if fewer > 0 and kind in STRONGER and options.mode != "pipeline":
            found |= mixed_capacity(capacities, -(-longest // fewer), options.layers)
    return found


def arithmetic_seconds(tokens: Sequence[int], cost: Cost, recompute: str) -> float:
    """Return the arithmetic of a step with a kind of recomputation, in rank-seconds: a lower bound."""
    priced = cost.choosing(Choices(recompute=recompute, layers=max(1, cost.layers)))
    return float(priced.compute_seconds(np.array(tokens, dtype=np.int64)).sum())
