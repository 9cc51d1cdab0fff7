"""The one entry of the planner: lengths, cluster and costs in, a plan out.

A new planner is one new file (in `baselines`, if it is not ours) with a function from a request to microbatches, and
one line in `_PLANNERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from lengthwise.core.errors import Collector, ConfigError, LengthwiseError, raise_problems
from lengthwise.core.names import unknown_name
from lengthwise.core.plan import RECOMPUTE_KINDS, Microbatch, Plan
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import read_whole
from lengthwise.cost import AllTermsCost, Cost, CostModel
from lengthwise.planner.baselines.bytescale import plan_bytescale
from lengthwise.planner.baselines.bytescale_naive import plan_bytescale_naive
from lengthwise.planner.baselines.power_of_two import plan_power_of_two
from lengthwise.planner.baselines.single_degree import plan_single_degree
from lengthwise.planner.baselines.static import plan_static
from lengthwise.planner.exchange import split_heads
from lengthwise.planner.offload import write_offload
from lengthwise.planner.portfolio import rival_plans
from lengthwise.planner.problem.bounds import has_lone_rings, least_makespan, shares_launches_only
from lengthwise.planner.problem.choices import Freedom, refuse_choices
from lengthwise.planner.problem.degrees import most_held_tokens
from lengthwise.planner.problem.request import PlanRequest, read_tokens, refuse_unheld
from lengthwise.planner.problem.score import score
from lengthwise.planner.problem.speeds import at_mean_speed, read_speeds, speed_runs
from lengthwise.planner.schedules.pipeline import pipeline_schedule, plan_pipeline
from lengthwise.planner.schedules.waves import plan_waves
from lengthwise.planner.search import plan_lengthwise

_PLANNERS: Mapping[str, Callable[[PlanRequest], list[Microbatch]]] = {
    "lengthwise": plan_lengthwise,
    "static": plan_static,
    "single-degree": plan_single_degree,
    "bytescale-naive": plan_bytescale_naive,
    "bytescale": plan_bytescale,
    "power-of-two": plan_power_of_two,
}
PLANNERS = tuple(_PLANNERS)
_MODES: Mapping[str, Callable[[PlanRequest], list[Microbatch]]] = {
    "free": plan_lengthwise,
    "waves": plan_waves,
    "pipeline": plan_lengthwise,
}
MODES = tuple(_MODES)
_SMALL = 10_000  # sequences x ranks; the other planners take 0.1 s then


def plan_step(
    tokens: Sequence[int],
    cluster: Cluster,
    cost: Cost,
    *,
    planner: str = "lengthwise",
    layers: int = 1,
    context_tokens: int | None = None,
    recompute: str = "none",
    offload: str = "off",
    heads: str = "off",
    mode: str = "free",
    speeds: Sequence[float] | None = None,
    stages: int | None = None,
    virtual: int | None = None,
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
        offload: `auto`: ranks may hold more than the capacity, each microbatch offloading what it must; `off`: none.
        heads: `auto`: rings may split heads, each as it is quickest; `off`: none does.
        mode: how ranks run beside each other, one of `MODES`; `lengthwise` plans all of them. The others plan `free`,
            and in mode `pipeline` run what they plan there through the stages.
        stages: of the pipeline that each rank is in mode `pipeline`; the costs are those of one stage.
        virtual: chunks of layers of a stage (default: 1).
        speeds: of each rank, a number above 0, 1 as fast as the costs say (default: all 1). `lengthwise` plans with
            them; the plans of the others are those for equal ranks, and only scored with them.

    Returns:
        A plan whose notes hold planner, predicted_seconds (the makespan), bound_seconds and cost (the version),
        and speeds where they are not all 1.

    Raises:
        ConfigError: what `read_options` refuses.
        PlanError: no sequences, a length below 1, or sequences that the cluster cannot hold (all of them named).
        Problems: several of these.
    """
    asked = read_options(
        cluster.ranks, cost, planner=planner, layers=layers, context_tokens=context_tokens, recompute=recompute,
        offload=offload, heads=heads, mode=mode, speeds=speeds, stages=stages, virtual=virtual,
    )  # fmt: skip
    lengths, freedom, paces = read_tokens(tokens), asked.freedom, asked.paces
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
    best = empty = _empty_plan(request, asked.layers, mode)
    least = inf
    for plan in _finished_plans(request, empty, cost, freedom, planner):
        seconds = score(plan, cost, speeds=paces).makespan_seconds
        if seconds < least:
            best, least = plan, seconds
    notes = {"planner": planner, "predicted_seconds": least, "bound_seconds": _bound_of(best, request)}
    runs = None if paces is None else speed_runs(paces)
    return replace(best, notes={**notes, "cost": cost.version, **({"speeds": runs} if runs else {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step is to be planned, checked; `paces` are None where all ranks are alike."""

    layers: int
    context_tokens: int | None
    freedom: Freedom
    paces: tuple[float, ...] | None
    stages: int | None
    virtual: int | None


def read_options(
    ranks: int,
    cost: Cost | None,
    *,
    planner: str = "lengthwise",
    layers: int = 1,
    context_tokens: int | None = None,
    recompute: str = "none",
    offload: str = "off",
    heads: str = "off",
    mode: str = "free",
    speeds: Sequence[float] | None = None,
    stages: int | None = None,
    virtual: int | None = None,
) -> StepOptions:
    """Check all of `plan_step` but lengths: before they are read, too. Without costs, what hangs on them is not.

    Raises:
        ConfigError: unknown planner, mode, choice or kind of recomputation, a mode that the planner does not plan,
            choices that these costs do not price, layers or context_tokens below 1, speeds that are none or not
            planned in this mode or with these choices, or stages that are none, too many, not the costs' or of no use.
        Problems: several of these.
    """
    problems = Collector()
    problems.attempt(partial(_refuse_names, planner, mode, recompute))
    numbers = {"layers": layers, "context_tokens": context_tokens, "stages": stages, "virtual": virtual}
    read = {
        name: None if value is None else problems.attempt(partial(read_whole, name, value))
        for name, value in numbers.items()
    }
    paces = problems.attempt(partial(_read_paces, speeds, ranks, mode))
    freedom = Freedom(recompute=recompute, offload=offload, heads=heads)
    depth = read["layers"] or 1
    problems.attempt(partial(refuse_choices, freedom, cost, depth, paces))
    if mode in _MODES and all(
        read[name] is not None or numbers[name] is None for name in ("layers", "stages", "virtual")
    ):
        problems.attempt(partial(_refuse_stages, mode, read["stages"], read["virtual"], depth, cost))
    problems.raise_all()
    return StepOptions(
        layers=depth,
        context_tokens=read["context_tokens"],
        freedom=freedom,
        paces=paces,
        stages=read["stages"],
        virtual=read["virtual"],
    )


def _read_paces(speeds: Sequence[float] | None, ranks: int, mode: str) -> tuple[float, ...] | None:
    """Check speeds; None where all ranks are alike."""
    paces = read_speeds(speeds, ranks)
    if paces is not None and mode != "free":
        remedy = "Use mode free, or leave speeds out."
        raise ConfigError("speeds", expected=f"all 1 in mode {mode}", got="unequal ranks", remedy=remedy)
    return paces


def _empty_plan(request: PlanRequest, layers: int, mode: str) -> Plan:
    """Make the plan to which microbatches are still to come."""
    return Plan(
        ranks=request.cluster.ranks,
        layers=layers,
        capacity=request.cluster.capacity_tokens,
        tokens=request.tokens,
        microbatches=(),
        schedule=pipeline_schedule(request.stages, request.virtual) if mode == "pipeline" else {"kind": mode},
        requires=() if mode == "free" else (mode,),
    )


def _finished_plans(request: PlanRequest, empty: Plan, cost: Cost, freedom: Freedom, planner: str) -> Iterator[Plan]:
    """Yield every plan that is proposed, with each part of the freedom that there is, as it would be run."""
    longest, mode = max(request.tokens), empty.schedule["kind"]
    for variant in freedom.variants(request.cost, longest, request.cluster, decides_heads=planner == "lengthwise"):
        asked = request if variant == request.cost else replace(request, cost=variant)
        for microbatches in _proposals(asked, planner, mode):
            yield _finished(replace(empty, microbatches=tuple(microbatches)), cost, freedom)


def _refuse_names(planner: str, mode: str, recompute: str) -> None:
    """Refuse names that do not exist or do not go together."""
    named = (("planner", planner, PLANNERS), ("mode", mode, MODES), ("recompute", recompute, RECOMPUTE_KINDS))
    raise_problems([unknown_name(name, value, known) for name, value, known in named if value not in known])
    if mode == "waves" and planner != "lengthwise":
        remedy = "Use planner lengthwise, or mode free."
        raise ConfigError("mode", expected=f"free, all that planner {planner} plans", got=mode, remedy=remedy)


def _proposals(request: PlanRequest, planner: str, mode: str) -> Iterator[list[Microbatch]]:
    """Yield what to choose from: of small steps under costs with all terms, `lengthwise` also looks at all others'.

    Where a few sequences meet on a few ranks, what they cost together, and where, is not in the price of each alone:
    transfers hidden behind another's attention, rings that cross nodes.
    """
    if planner == "lengthwise" and mode != "waves" and request.priced_stages > 1 and request.speeds is None:
        yield from plan_pipeline(request)
        return
    yield _MODES[mode](request) if planner == "lengthwise" else _PLANNERS[planner](request)
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


def _refuse_stages(mode: str, stages: int | None, virtual: int | None, layers: int, cost: Cost | None) -> None:
    """Refuse stages and virtual ones that are too many, not those of the costs, or without their mode."""
    problems: list[LengthwiseError] = []
    asked = {"stages": stages, "virtual": virtual}
    for name, value in asked.items():
        if value is not None and mode != "pipeline":
            remedy = f"Use mode pipeline, or leave `{name}` out."
            problems.append(ConfigError(name, expected=f"nothing in mode {mode}", got=repr(value), remedy=remedy))
    if mode == "pipeline" and stages is None:
        expected = "a number in mode pipeline"
        problems.append(ConfigError("stages", expected=expected, got="none", remedy="Give `stages`."))
    raise_problems(problems)
    if mode != "pipeline":
        return
    chunks = (stages or 1) * (virtual or 1)
    if layers > 1 and chunks > layers:
        raise ConfigError(
            "stages",
            expected=f"stages x virtual of at most the {layers} layers",
            got=f"{stages} x {virtual or 1}",
            remedy="Use fewer of them.",
        )
    if isinstance(cost, AllTermsCost) and stages != cost.stages:
        raise ConfigError(
            "stages", expected=f"{cost.stages}, as in the costs", got=str(stages), remedy="Make costs of these stages."
        )
