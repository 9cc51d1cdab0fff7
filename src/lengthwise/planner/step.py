"""The one entry of the planner: lengths, cluster and costs in, a plan out.

A new planner is one new file with a function from a request to microbatches, and one line in `_PLANNERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import unknown_name
from lengthwise.core.plan import RECOMPUTE_KINDS, Microbatch, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, recompute_cost
from lengthwise.planner.bounds import has_lone_rings, least_makespan, shares_launches_only
from lengthwise.planner.bytescale import plan_bytescale
from lengthwise.planner.bytescale_naive import plan_bytescale_naive
from lengthwise.planner.lengthwise import plan_lengthwise
from lengthwise.planner.power_of_two import plan_power_of_two
from lengthwise.planner.request import PlanRequest, read_tokens, refuse_unheld
from lengthwise.planner.score import score
from lengthwise.planner.single_degree import plan_single_degree
from lengthwise.planner.speeds import at_mean_speed, read_speeds, speed_runs
from lengthwise.planner.static import plan_static
from lengthwise.planner.waves import plan_waves

_PLANNERS: Mapping[str, Callable[[PlanRequest], list[Microbatch]]] = {
    "lengthwise": plan_lengthwise,
    "static": plan_static,
    "single-degree": plan_single_degree,
    "bytescale-naive": plan_bytescale_naive,
    "bytescale": plan_bytescale,
    "power-of-two": plan_power_of_two,
}
PLANNERS = tuple(_PLANNERS)
_MODES: Mapping[str, Callable[[PlanRequest], list[Microbatch]]] = {"free": plan_lengthwise, "waves": plan_waves}
MODES = tuple(_MODES)


def plan_step(
    tokens: Sequence[int],
    cluster: Cluster,
    cost: Cost,
    *,
    planner: str = "lengthwise",
    layers: int = 1,
    context_tokens: int | None = None,
    recompute: str = "none",
    mode: str = "free",
    speeds: Sequence[float] | None = None,
) -> Plan:
    """Plan one optimizer step.

    Args:
        tokens: length of each sequence of the global batch, in tokens.
        cluster: ranks, and the tokens that one of them holds in one microbatch.
        cost: what work takes; its version is noted in the plan.
        planner: one of `PLANNERS`.
        layers: layers of the model, for readers that count memory by them.
        context_tokens: what the mesh of `static` is sized for (default: the longest sequence).
        recompute: what backward computes again, in every microbatch: one of `RECOMPUTE_KINDS`.
        mode: how ranks run beside each other, one of `MODES`; `lengthwise` plans all of them, the others `free`.

        speeds: of each rank, a number above 0, 1 as fast as the costs say (default: all 1). `lengthwise` plans with
            them; the plans of the others are those for equal ranks, and only scored with them.

    Returns:
        A plan whose notes hold planner, predicted_seconds (the makespan), bound_seconds and cost (the version),
        and speeds where they are not all 1.

    Raises:
        ConfigError: unknown planner, mode or kind of recomputation, a mode that the planner does not plan, or layers
            or context_tokens below 1, speeds that are none or in another mode than free.
        PlanError: no sequences, a length below 1, or sequences that the cluster cannot hold (all of them named).
    """
    if planner not in _PLANNERS:
        raise unknown_name("planner", planner, PLANNERS)
    if mode not in _MODES:
        raise unknown_name("mode", mode, MODES)
    if mode != "free" and planner != "lengthwise":
        remedy = "Use planner lengthwise, or mode free."
        raise ConfigError("mode", expected=f"free, all that planner {planner} plans", got=mode, remedy=remedy)
    if recompute not in RECOMPUTE_KINDS:
        raise unknown_name("recompute", recompute, RECOMPUTE_KINDS)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ConfigError("layers", expected="a whole number of at least 1", got=repr(layers), remedy="Mend layers.")
    paces = read_speeds(speeds, cluster.ranks)
    if paces is not None and mode != "free":
        remedy = "Use mode free, or leave speeds out."
        raise ConfigError("speeds", expected=f"all 1 in mode {mode}", got="unequal ranks", remedy=remedy)
    lengths = read_tokens(tokens)
    refuse_unheld(lengths, cluster)
    priced, relative = at_mean_speed(recompute_cost(cost, recompute), paces)
    request = PlanRequest(tokens=lengths, cluster=cluster, cost=priced, context_tokens=context_tokens, speeds=relative)
    microbatches = _microbatches(request, planner, mode, recompute)
    plan = Plan(
        ranks=cluster.ranks,
        layers=layers,
        capacity=cluster.capacity_tokens,
        tokens=lengths,
        microbatches=microbatches,
        schedule={"kind": mode},
        requires=_features(mode, microbatches),
    )
    notes = {
        "planner": planner,
        "predicted_seconds": score(plan, cost, speeds=paces).makespan_seconds,
        "bound_seconds": _bound_of(plan, request),
        "cost": cost.version,
    }
    return replace(plan, notes=notes if paces is None else {**notes, "speeds": speed_runs(paces)})


def _features(mode: str, microbatches: Sequence[Microbatch]) -> tuple[str, ...]:
    """List what a reader must know to run these microbatches."""
    shares = any(piece.shares is not None for microbatch in microbatches for piece in microbatch.pieces)
    return (() if mode == "free" else (mode,)) + (("shares",) if shares else ())


def _microbatches(request: PlanRequest, planner: str, mode: str, recompute: str) -> tuple[Microbatch, ...]:
    microbatches = _MODES[mode](request) if planner == "lengthwise" else _PLANNERS[planner](request)
    if recompute == "none":
        return tuple(microbatches)
    return tuple(replace(each, recompute=recompute) for each in microbatches)


def _bound_of(plan: Plan, request: PlanRequest) -> float:
    """Find the highest bound that holds for plans of this kind."""
    if has_lone_rings(plan):
        return request.bound_seconds
    if shares_launches_only(plan):
        return request.shared_bound_seconds
    return least_makespan(request.lengths, request.cluster, request.cost, ground=request.ground, lone_rings=False)
