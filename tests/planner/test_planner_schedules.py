"""Plans in lock-step (waves) and in stages (pipelines): valid, in one order on every rank, level, near the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.fake_nccl import FakeNccl
from testing.order import check_order
from testing.stage_actions import stage_items

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster, LayerCut
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost, sharded_cost, step_memory
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, bound_seconds, plan_step, score
from lengthwise.planner.problem.bounds import least_makespan
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.schedules.pipeline import pipeline_schedule
from lengthwise.planner.schedules.shelves import plan_shelves, write_shelves
from lengthwise.planner.search import plan_lengthwise
from lengthwise.program import check_plan, ring_order
from lengthwise.simulator import simulate_plan
from properties import costliest, costly

COMPUTE = Cost(quadratic_seconds=1.0, linear_seconds=32768.0)
TERMS = plain_cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)
COSTS = (
    COMPUTE,
    TERMS,
    plain_cost(linear_seconds=1.0, hop_seconds=500.0),
    Cost(fixed_seconds=1.0),
    plain_cost(ring_seconds=1.0),
    all_terms_cost(named_shape("llama-7b"), named_hardware("h100")),
    sharded_cost(
        all_terms_cost(named_shape("llama-7b"), named_hardware("h100")),
        replace(step_memory(named_shape("llama-7b"), named_hardware("h100"), 12), shard="zero3"),
    ),
)
CAPACITY = 97
LENGTHS = st.lists(st.sampled_from([1, 2, 96, 97, 98, 194, 195, 1009]) | st.integers(1, 900), min_size=1, max_size=25)


def planned_twice(tokens, ranks, cost, **options):
    """Plan any lengths; check that the plan is valid, as predicted, above its bound, the same again, and ordered."""
    cluster = Cluster(ranks=ranks, capacity_tokens=CAPACITY)
    tokens = [min(length, cluster.longest_tokens) for length in tokens]
    plan = plan_step(tokens, cluster, cost, PlanOptions(**options))
    check_plan(plan)
    assert plan.notes["predicted_seconds"] == score(plan, cost).makespan_seconds
    assert plan.notes["bound_seconds"] <= plan.notes["predicted_seconds"] * (1 + 1e-9)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_step(tokens, cluster, cost, PlanOptions(**options)).digest() == plan.digest()
    assert all(p.ranks == ring_order(min(p.ranks), p.degree) for m in plan.microbatches for p in m.pieces)
    check_order(replace(plan, schedule={"kind": "free"}, requires=()))
    return plan


@costly
@given(ranks=st.sampled_from((1, 2, 3, 5, 7, 12)), tokens=LENGTHS, cost=st.sampled_from(COSTS))
def test_waves_plan_any_lengths_on_any_ranks(ranks: int, tokens: list[int], cost: Cost) -> None:
    plan = planned_twice(tokens, ranks, cost, mode="waves", layers=2)
    assert plan.schedule == {"kind": "waves"}
    for microbatch in plan.microbatches:
        rings = [piece for piece in microbatch.pieces if piece.degree > 1]
        assert len({rank for piece in rings for rank in piece.ranks}) == sum(piece.degree for piece in rings)


def test_waves_are_level_on_published_lengths() -> None:
    cluster = Cluster(ranks=8, capacity_tokens=16384)
    tokens = draw_lengths("prolong", 800_000, 0, longest_tokens=int(0.98 * cluster.longest_tokens))
    plan = plan_step(tokens, cluster, COMPUTE, PlanOptions(mode="waves"))
    check_plan(plan)
    assert plan.notes["predicted_seconds"] <= 1.01 * bound_seconds(tokens, cluster, COMPUTE)


def test_waves_cut_a_short_sequence_that_all_others_would_wait_for_and_are_few_where_launches_cost() -> None:
    """One of 100 tokens would keep three ranks of 40 waiting; cut over all it does not."""
    cluster = Cluster(ranks=4, capacity_tokens=100)
    plan = plan_step([100, 1, 1, 1, 1], cluster, Cost(linear_seconds=1.0), PlanOptions(mode="waves"))
    assert plan.notes["predicted_seconds"] == pytest.approx(26)
    launches = Cost(linear_seconds=1.0, fixed_seconds=1000.0)
    assert len(plan_step([10] * 80, cluster, launches, PlanOptions(mode="waves")).microbatches) == 2


def test_waves_are_few_where_each_gathers() -> None:
    """4K tokens a rank of 8: two waves, where gathers left out made four, a fifth longer."""
    shape, hardware = named_shape("llama-3.1-8b"), named_hardware("h100").with_kernel("flash2")
    plain = all_terms_cost(shape, hardware)
    sharded = sharded_cost(plain, replace(step_memory(shape, hardware, 8), shard="zero3"))
    cluster, options = Cluster(ranks=8, capacity_tokens=4096), PlanOptions(mode="waves", layers=32, recompute="layer")
    tokens = [231, 692, 1074, 2125, 3142, 3960, 21544]
    blind, plan = (plan_step(tokens, cluster, cost, options) for cost in (plain, sharded))
    assert (len(blind.microbatches), len(plan.microbatches)) == (4, 2)
    took = score(plan, sharded).makespan_seconds
    assert took == plan.notes["predicted_seconds"] < score(blind, sharded).makespan_seconds / 1.15
    assert simulate_plan(plan, sharded).step_seconds == pytest.approx(took, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "ranks", "capacity", "cost"),
    [
        ([1], 3, 29, COSTS[5]),  # even shares of one wave more than the fewest are less than a token takes
        ([158], 3, 64, replace(TERMS, fixed_seconds=64299696292.644646)),  # a wave less its launch is off in digits
    ],
)
def test_tiny_steps_are_one_wave(tokens, ranks, capacity, cost):
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=capacity), cost, PlanOptions(mode="waves"))
    check_plan(plan)
    assert len(plan.microbatches) == 1


@costliest
@given(
    ranks=st.sampled_from((1, 2, 3, 5, 12)),
    tokens=LENGTHS,
    stages=st.sampled_from((1, 2, 3, 5)),
    virtual=st.sampled_from((1, 2, 3)),
    cost=st.sampled_from(COSTS[:5]) | st.none(),
    planner=st.sampled_from(("lengthwise", "lengthwise", "bytescale", "static")),
)
def test_pipelines_plan_any_lengths_on_any_ranks(ranks, tokens, stages, virtual, cost, planner) -> None:
    cost = cost or all_terms_cost(named_shape("llama-7b"), named_hardware("h100"), stages=stages)
    cut = {"stages": stages, "virtual": virtual}
    plan = planned_twice(tokens, ranks, cost, mode="pipeline", layers=32, planner=planner, **cut)
    assert plan.schedule == {"kind": "pipeline", **cut}
    assert FakeNccl(stage_items(plan, *[lambda *_: 1.0] * 3)).seconds > 0


def test_pipelines_end_near_the_bound_and_before_free_plans() -> None:
    cluster = Cluster(ranks=16, capacity_tokens=8192)
    tokens = draw_lengths("wikipedia", 262_144 * 16, 0, longest_tokens=100_000)
    plan = plan_step(tokens, cluster, TERMS, PlanOptions(mode="pipeline", stages=8, virtual=2))
    check_plan(plan)
    free = replace(plan, microbatches=plan_step(tokens, cluster, TERMS).microbatches)
    assert plan.notes["predicted_seconds"] <= 1.13 * plan.notes["bound_seconds"]
    assert plan.notes["predicted_seconds"] < 0.985 * score(free, TERMS).makespan_seconds


def test_bound_of_pipelines_is_reached_by_one_sequence_and_by_launches() -> None:
    cost = Cost(linear_seconds=1.0, fixed_seconds=50.0)
    cluster = Cluster(ranks=2, capacity_tokens=100)
    plan = plan_step([200], cluster, cost, PlanOptions(mode="pipeline", stages=5))
    assert plan.notes["predicted_seconds"] == 5 * 150
    assert plan.notes["bound_seconds"] == pytest.approx(5 * 150)
    request = PlanRequest(tokens=(100,) * 20, cluster=cluster, cost=cost)
    options = {"topology": request.topology}
    assert least_makespan(request.lengths, cluster, cost, **options) == 1500
    assert least_makespan(request.lengths, cluster, cost, **options, cut=LayerCut(stages=5, virtual=2)) == 1500 + 50 * 2


def _plans(request: PlanRequest) -> list[Plan]:
    schedule = pipeline_schedule(request.cut)
    found = [write_shelves(request, each) for each in plan_shelves(request)]
    return [replace(request.draft(each), layers=64, schedule=schedule, requires=("pipeline",)) for each in found]


def test_shelves_end_before_plans_for_ranks_without_stages() -> None:
    """Only with both ways to count what is lost."""
    cost = all_terms_cost(named_shape("mixtral-8x22b"), named_hardware("bytescale-gpu"), stages=2)
    tokens = tuple(draw_lengths("github", 192 * 43_690, 0, longest_tokens=262_144))
    request = PlanRequest(tokens=tokens, cluster=Cluster(ranks=192, capacity_tokens=8192), cost=cost, stages=2)
    staged = score(request.draft(plan_lengthwise(request)), cost).makespan_seconds
    assert min(score(plan, cost).makespan_seconds for plan in _plans(request)) * 1.092 <= staged
