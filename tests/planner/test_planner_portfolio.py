"""No other planner ends a step 1 % sooner than `lengthwise`, whatever costs and lengths are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing.plans import planners_of

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.planner import PlanOptions, plan_step, registry
from lengthwise.planner.problem.effort import FAR
from lengthwise.planner.problem.score import score
from lengthwise.program import check_plan
from lengthwise.program.ring_order import interval_microbatch
from properties import costliest, costly

LLAMA_7B, H100 = named_shape("llama-7b"), named_hardware("h100")
COSTS = st.builds(
    plain_cost,
    quadratic_seconds=st.sampled_from([0.0, 1.0]),
    linear_seconds=st.sampled_from([100.0, 4096.0]),
    fixed_seconds=st.sampled_from([0.0, 2e4, 1e6]),
    ring_seconds=st.sampled_from([0.0, 4e3, 2e5]),
)


@costly
@given(
    ranks=st.sampled_from([1, 2, 3, 5, 7, 12, 24]),
    capacity=st.sampled_from([1, 7, 64, 1000]),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    cost=COSTS,
)
@example(24, 7, [0.3, 0.01] * 20, plain_cost(linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=3e4))
def test_no_planner_ends_sooner(ranks: int, capacity: int, shares: list[float], cost: Cost) -> None:
    tokens = [max(1, int(share**3 * ranks * capacity)) for share in shares]
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    seconds = {
        name: score(plan_step(tokens, cluster, cost, PlanOptions(planner=name)), cost).makespan_seconds
        for name in planners_of(tokens, cluster)
    }
    assert seconds["lengthwise"] <= min(seconds.values()) * FAR


@costliest
@given(
    ranks=st.sampled_from([1, 2, 3, 5, 7]),
    capacity=st.sampled_from([1, 7, 64, 1000]),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    stages=st.sampled_from([2, 3, 5]),
    virtual=st.sampled_from([1, 2, 3]),
    cost=COSTS | st.none(),
    mode=st.sampled_from(["free", "pipeline"]),
)
@example(ranks=2, capacity=1, shares=[0.0] * 3, stages=4, virtual=3, cost=Cost(linear_seconds=1.0), mode="pipeline")
def test_no_planner_ends_sooner_through_stages(ranks, capacity, shares, stages, virtual, cost, mode):
    """Mode free has stages where its costs have them; the plan of mode free run through the stages is no sooner."""
    tokens = [max(1, int(share**3 * ranks * capacity)) for share in shares]
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    options: dict[str, object] = {"mode": mode, "layers": 32}
    if mode == "pipeline":
        options |= {"stages": stages, "virtual": virtual}
    priced = cost or all_terms_cost(LLAMA_7B, H100, stages=stages)
    plans = {
        name: plan_step(tokens, cluster, priced, PlanOptions(planner=name, **options))
        for name in planners_of(tokens, cluster)
    }
    seconds = {name: score(plan, priced).makespan_seconds for name, plan in plans.items()}
    if cost is not None:
        free = plan_step(tokens, cluster, cost)
        seconds["free"] = score(replace(plans["lengthwise"], microbatches=free.microbatches), cost).makespan_seconds
    assert seconds["lengthwise"] <= min(seconds.values()) * FAR
    assert plans["lengthwise"].notes["bound_seconds"] <= seconds["lengthwise"] * (1 + 1e-9)


@costliest
@example(5, [0.9, 0.5, 0.4, 0.1], 1, "free", "auto", "auto", "none")
@given(
    ranks=st.sampled_from([1, 2, 3, 5, 7]),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    stages=st.sampled_from([1, 2]),
    mode=st.sampled_from(["free", "pipeline"]),
    offload=st.sampled_from(["off", "auto"]),
    heads=st.sampled_from(["off", "auto"]),
    recompute=st.sampled_from(["none", "layer"]),
)
def test_no_planner_ends_sooner_with_choices(ranks, shares, stages, mode, offload, heads, recompute):
    cost = all_terms_cost(LLAMA_7B, replace(H100, ranks_per_node=4), stages=stages)
    tokens = [max(1, int(share**3 * ranks * 8192 * (3 if offload == "auto" else 1))) for share in shares]
    cluster = Cluster(ranks=ranks, capacity_tokens=8192)
    options = {"layers": 32, "offload": offload, "heads": heads, "recompute": recompute}
    options |= {"mode": mode, "stages": stages} if mode == "pipeline" else {}
    plans = {
        name: plan_step(tokens, cluster, cost, PlanOptions(planner=name, **options))
        for name in planners_of(tokens, cluster)
    }
    check_plan(plans["lengthwise"])
    seconds = {name: score(plan, cost).makespan_seconds for name, plan in plans.items()}
    assert seconds["lengthwise"] <= min(seconds.values()) * FAR
    assert plans["lengthwise"].notes["bound_seconds"] <= seconds["lengthwise"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("planner", "stages", "count", "expected"),
    [
        ("watching", 1, 100, [False, True]),
        ("watching", 1, 501, [True]),
        ("static", 1, 20, [True]),
        ("static", 2, 20, [False, True]),
    ],
)
def test_rivals_choose_degrees_for_split_heads_and_on_small_steps_in_both_ways(
    monkeypatch, planner, stages, count, expected
):
    """Those whose degrees memory decides, in pipelines only."""
    asked = []

    def watching(request):
        asked.append(request.cost.choices.splits_heads)
        return [interval_microbatch(0, 1, [i]) for i in range(len(request.tokens))]

    monkeypatch.setitem(registry._BUILT_IN if planner == "static" else registry._registered, planner, watching)
    cost, cluster = all_terms_cost(LLAMA_7B, H100, stages=stages), Cluster(ranks=100, capacity_tokens=100)
    schedule = {"mode": "pipeline", "stages": stages} if stages > 1 else {}
    plan_step([10] * count, cluster, cost, PlanOptions(planner=planner, heads="auto", **schedule))
    assert asked == expected


def test_packs_cut_whole_are_tried_where_launches_cost_and_rings_of_one_sequence_are_at_their_bound() -> None:
    """Long sequences alone over both ranks are at the bound of such plans, 1.2 x as long as a few full packs cut."""
    tokens, cluster = [100, 28, 31, 48, 19, 119, 68, 78, 3, 66], Cluster(ranks=2, capacity_tokens=64)
    cost = plain_cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=1e8, ring_seconds=4e3)
    single, ours = (
        plan_step(tokens, cluster, cost, PlanOptions(planner=name)) for name in ("single-degree", "lengthwise")
    )
    assert ours.notes["predicted_seconds"] <= single.notes["predicted_seconds"]
