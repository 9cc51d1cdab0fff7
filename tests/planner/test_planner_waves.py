"""Plans in lock-step: every wave valid, level, and its transfers in one order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.order import check_order

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost, sharded_cost, step_memory
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, bound_seconds, plan_step, score
from lengthwise.program import check_plan, ring_order
from lengthwise.simulator import simulate_plan
from properties import costly
from tiers import some

COMPUTE = Cost(quadratic_seconds=1.0, linear_seconds=32768.0)
ALL_FOUR = plain_cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)
COSTS = (
    COMPUTE,
    ALL_FOUR,
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


@costly
@given(
    ranks=st.sampled_from((1, 2, 3, 5, 7, 12)),
    tokens=st.lists(st.sampled_from([1, 2, 96, 97, 98, 194, 195, 1009]) | st.integers(1, 900), min_size=1, max_size=25),
    cost=st.sampled_from(COSTS),
)
def test_waves_plan_any_lengths_on_any_ranks(ranks: int, tokens: list[int], cost: Cost) -> None:
    cluster = Cluster(ranks=ranks, capacity_tokens=CAPACITY)
    tokens = [min(length, cluster.longest_tokens) for length in tokens]
    plan = plan_step(tokens, cluster, cost, PlanOptions(mode="waves", layers=2))
    assert plan.schedule == {"kind": "waves"}
    check_plan(plan)
    assert Plan.from_json(plan.to_json()) == plan
    makespan = score(plan, cost).makespan_seconds
    assert plan.notes["predicted_seconds"] == makespan
    assert plan.notes["bound_seconds"] <= makespan * (1 + 1e-9)
    for microbatch in plan.microbatches:
        rings = [piece for piece in microbatch.pieces if piece.degree > 1]
        assert len({rank for piece in rings for rank in piece.ranks}) == sum(piece.degree for piece in rings)
        assert all(piece.ranks == ring_order(min(piece.ranks), piece.degree) for piece in rings)
    check_order(replace(plan, schedule={"kind": "free"}, requires=()))


@pytest.mark.parametrize("ranks", some([8, 64], 0))
@pytest.mark.parametrize("recipe", ["github", "prolong"])
def test_waves_are_level_on_published_lengths(ranks: int, recipe: str) -> None:
    cluster = Cluster(ranks=ranks, capacity_tokens=16384)
    tokens = draw_lengths(recipe, 100_000 * ranks, 0, longest_tokens=int(0.98 * cluster.longest_tokens))
    plan = plan_step(tokens, cluster, COMPUTE, PlanOptions(mode="waves"))
    check_plan(plan)
    assert plan.notes["predicted_seconds"] <= 1.01 * bound_seconds(tokens, cluster, COMPUTE)


def test_waves_begin_with_the_sequence_that_sets_one() -> None:
    """670K tokens take longer than an even wave at any degree: 1.08 of what the step then takes at least."""
    cluster = Cluster(ranks=256, capacity_tokens=16384)
    tokens = draw_lengths("github", 32_768 * 256, 0, longest_tokens=1_700_000)
    plan = plan_step(tokens, cluster, ALL_FOUR, PlanOptions(mode="waves"))
    check_plan(plan)
    assert tokens.index(max(tokens)) in {i for piece in plan.microbatches[0].pieces for i in piece.sequences}
    assert plan.notes["predicted_seconds"] <= 1.1 * plan.notes["bound_seconds"]


def test_waves_of_even_shares_end_near_the_bound_where_they_are_few() -> None:
    """32K tokens a rank of 16K: two waves can hold no more, three even ones are best."""
    tokens = draw_lengths("prolong", 32_768 * 64, 0, longest_tokens=40_000)
    plan = plan_step(tokens, Cluster(ranks=64, capacity_tokens=16384), ALL_FOUR, PlanOptions(mode="waves"))
    check_plan(plan)
    assert len(plan.microbatches) == 3
    assert plan.notes["predicted_seconds"] <= 1.04 * plan.notes["bound_seconds"]


def test_waves_cut_a_short_sequence_that_all_others_would_wait_for_and_are_few_where_launches_cost() -> None:
    """One of 100 tokens would keep three ranks of 40 waiting; cut over all it does not."""
    cluster = Cluster(ranks=4, capacity_tokens=100)
    plan = plan_step([100, 1, 1, 1, 1], cluster, Cost(linear_seconds=1.0), PlanOptions(mode="waves"))
    assert plan.notes["predicted_seconds"] == pytest.approx(26)
    launches = Cost(linear_seconds=1.0, fixed_seconds=1000.0)
    assert len(plan_step([10] * 80, cluster, launches, PlanOptions(mode="waves")).microbatches) == 2


def test_waves_are_few_where_each_gathers() -> None:
    """4K tokens a rank of 8: two waves, where gathers left out made four, a fifth longer."""
    shape, hardware = named_shape("llama-3.1-8b"), named_hardware("h100")
    plain = all_terms_cost(shape, hardware)
    sharded = sharded_cost(plain, replace(step_memory(shape, hardware, 8), shard="zero3"))
    cluster, options = Cluster(ranks=8, capacity_tokens=4096), PlanOptions(mode="waves", layers=32, recompute="layer")
    tokens = [231, 692, 1074, 2125, 3142, 3960, 21544]
    blind, plan = (plan_step(tokens, cluster, cost, options) for cost in (plain, sharded))
    assert (len(blind.microbatches), len(plan.microbatches)) == (4, 2)
    took = score(plan, sharded).makespan_seconds
    assert took == plan.notes["predicted_seconds"] < score(blind, sharded).makespan_seconds / 1.15
    assert simulate_plan(plan, sharded).step_seconds == pytest.approx(took, rel=0.02)


def test_modes_are_refused_by_name() -> None:
    cluster = Cluster(ranks=2, capacity_tokens=10)
    with pytest.raises(ConfigError, match="Did you mean `waves`"):
        plan_step([5], cluster, COMPUTE, PlanOptions(mode="wave"))
    with pytest.raises(ConfigError, match="free, all that planner static plans; got waves"):
        plan_step([5], cluster, COMPUTE, PlanOptions(planner="static", mode="waves"))


@pytest.mark.parametrize(
    ("tokens", "ranks", "capacity", "cost"),
    [
        ([1], 3, 29, COSTS[5]),  # even shares of one wave more than the fewest are less than a token takes
        ([158], 3, 64, replace(ALL_FOUR, fixed_seconds=64299696292.644646)),  # a wave less its launch is off in digits
        ([14, 3, 64, 1], 2, 64, Cost(linear_seconds=0.003, fixed_seconds=1e12)),
    ],
)
def test_tiny_steps_are_one_wave(tokens, ranks, capacity, cost):
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=capacity), cost, PlanOptions(mode="waves"))
    check_plan(plan)
    assert len(plan.microbatches) == 1
