"""The one entry of the planner: lengths, cluster, costs and options in, a plan out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from lengthwise.core.plan import Microbatch, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import AllTermsCost, Cost, CostModel
from lengthwise.planner.exchange import split_heads
from lengthwise.planner.offload import write_offload
from lengthwise.planner.options import PlanOptions
from lengthwise.planner.portfolio import rival_plans
from lengthwise.planner.problem.bounds import has_lone_rings, least_makespan, shares_launches_only
from lengthwise.planner.problem.choices import Freedom
from lengthwise.planner.problem.degrees import most_held_tokens
from lengthwise.planner.problem.request import PlanRequest, read_tokens, refuse_unheld
from lengthwise.planner.problem.score import score
from lengthwise.planner.problem.speeds import at_mean_speed, speed_runs
from lengthwise.planner.registry import find_planner
from lengthwise.planner.schedules.pipeline import pipeline_schedule, plan_pipeline
from lengthwise.planner.schedules.waves import plan_waves

_DEFAULT = PlanOptions()
_SMALL = 10_000  # sequences x ranks; the other planners take 0.1 s then


def plan_step(tokens: Sequence[int], cluster: Cluster, cost: Cost, options: PlanOptions = _DEFAULT) -> Plan:
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
        ConfigError: what `PlanOptions.checked` refuses.
        PlanError: no sequences, a length below 1, or sequences that the cluster cannot hold (all of them named).
        Problems: several of these.
    """
    asked = options.checked(cluster.ranks, cost)
    lengths, freedom, paces = read_tokens(tokens), asked.freedom, asked.speeds
    widest, relative = at_mean_speed(freedom.widest(cost, cluster, asked.layers), paces)
    refuse_unheld(lengths, replace(cluster, capacity_tokens=most_held_tokens(widest, cluster)))
    request = PlanRequest(
        tokens=lengths,
        cluster=cluster,
        cost=widest,
        context_tokens=asked.context_tokens,
        speeds=relative,
        stages=asked.stages or 1,
        virtual=asked.virtual or 1,
    )
    best = empty = _empty_plan(request, asked)
    least = inf
    for plan in _finished_plans(request, empty, cost, asked):
        seconds = score(plan, cost, speeds=paces).makespan_seconds
        if seconds < least:
            best, least = plan, seconds
    notes = {"planner": asked.planner, "predicted_seconds": least, "bound_seconds": _bound_of(best, request)}
    runs = None if paces is None else speed_runs(paces)
    return replace(best, notes={**notes, "cost": cost.version, **({"speeds": runs} if runs else {})})


def _empty_plan(request: PlanRequest, options: PlanOptions) -> Plan:
    """Make the plan to which microbatches are still to come."""
    mode = options.mode
    return Plan(
        ranks=request.cluster.ranks,
        layers=options.layers,
        capacity=request.cluster.capacity_tokens,
        tokens=request.tokens,
        microbatches=(),
        schedule=pipeline_schedule(request.stages, request.virtual) if mode == "pipeline" else {"kind": mode},
        requires=() if mode == "free" else (mode,),
    )


def _finished_plans(request: PlanRequest, empty: Plan, cost: Cost, options: PlanOptions) -> Iterator[Plan]:
    """Yield every plan that is proposed, with each part of the freedom that there is, as it would be run."""
    freedom, longest, decides_heads = options.freedom, max(request.tokens), options.planner == "lengthwise"
    for variant in freedom.variants(request.cost, longest, request.cluster, decides_heads=decides_heads):
        asked = request if variant == request.cost else replace(request, cost=variant)
        for microbatches in _proposals(asked, options.planner, options.mode):
            yield _finished(replace(empty, microbatches=tuple(microbatches)), cost, freedom)


def _proposals(request: PlanRequest, planner: str, mode: str) -> Iterator[list[Microbatch]]:
    """Yield what to choose from: of small steps under costs with all terms, `lengthwise` also looks at all others'.

    Where a few sequences meet on a few ranks, what they cost together, and where, is not in the price of each alone:
    transfers hidden behind another's attention, rings that cross nodes.
    """
    if planner == "lengthwise" and mode != "waves" and request.priced_stages > 1 and request.speeds is None:
        yield from plan_pipeline(request)
        return
    yield plan_waves(request) if mode == "waves" else find_planner(planner)(request)
    is_small = len(request.tokens) * request.cluster.ranks <= _SMALL and not isinstance(request.cost, CostModel)
    if planner == "lengthwise" and mode != "waves" and is_small:
        yield from rival_plans(request)


def _finished(plan: Plan, cost: Cost, freedom: Freedom) -> Plan:
    """Write into a plan what follows from its degrees: recomputation, offload ratios, splits of heads."""
    if freedom.recompute != "none":
        recomputed = tuple(replace(each, recompute=freedom.recompute) for each in plan.microbatches)
        plan = replace(plan, microbatches=recomputed)
    if freedom.offload == "auto":
        plan = write_offload(plan)
    if any(piece.shares is not None for microbatch in plan.microbatches for piece in microbatch.pieces):
        plan = replace(plan, requires=(*plan.requires, "shares"))
    return split_heads(plan, cost) if freedom.heads == "auto" and isinstance(cost, AllTermsCost) else plan


def _bound_of(plan: Plan, request: PlanRequest) -> float:
    """Find the highest bound that holds for plans of this kind."""
    lone_rings, shared_launches = has_lone_rings(plan), shares_launches_only(plan)
    if lone_rings:
        bound = request.bound_seconds
    elif shared_launches:
        bound = request.shared_bound_seconds
    else:
        bound = least_makespan(request.lengths, request.cluster, request.cost, ground=request.ground, lone_rings=False)
    if request.priced_stages == 1:
        return bound
    staged = least_makespan(
        request.lengths,
        request.cluster,
        request.cost,
        ground=request.ground,
        lone_rings=lone_rings or shared_launches,
        shared_launches=not lone_rings,
        stages=request.priced_stages,
        virtual=request.virtual,
    )
    return max(bound, staged)
