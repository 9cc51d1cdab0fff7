"""The fixed mesh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import CostModel
from lengthwise.planner import check_plan, plan_step, score
from lengthwise.planner.static import context_parallel_ranks

COST = CostModel(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0)


@pytest.mark.parametrize(
    ("ranks", "context", "expected"), [(8, 100, 1), (8, 101, 2), (8, 201, 4), (6, 201, 3), (7, 101, 7), (12, 401, 6)]
)
def test_static_mesh_takes_the_smallest_divisor_that_holds_the_context(ranks: int, context: int, expected: int) -> None:
    assert context_parallel_ranks(Cluster(ranks=ranks, capacity_tokens=100), context) == expected


def test_static_packs_in_data_order_and_deals_in_turn() -> None:
    plan = plan_step([150, 60, 150, 40, 150], Cluster(ranks=4, capacity_tokens=100), COST, planner="static")
    pieces = [microbatch.pieces[0] for microbatch in plan.microbatches]
    assert [piece.sequences for piece in pieces] == [(0, 3), (1,), (2,), (4,)]
    assert [piece.ranks for piece in pieces] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_static_mesh_without_need_for_rings_is_data_parallel() -> None:
    plan = plan_step([50, 60, 70], Cluster(ranks=3, capacity_tokens=100), COST, planner="static")
    assert plan.ring_tokens == 0
    assert [microbatch.ranks for microbatch in plan.microbatches] == [(0,), (1,), (2,)]


def test_static_mesh_is_sized_for_the_context_even_without_long_sequences() -> None:
    cluster = Cluster(ranks=4, capacity_tokens=100)
    plan = plan_step([50, 60], cluster, COST, planner="static", context_tokens=400)
    assert [microbatch.ranks for microbatch in plan.microbatches] == [(0, 1, 2, 3)]


def test_static_refuses_contexts_that_do_not_work() -> None:
    cluster = Cluster(ranks=4, capacity_tokens=100)
    with pytest.raises(PlanError, match="sequence 1: expected at most context_tokens = 100 tokens; got 150"):
        plan_step([50, 150], cluster, COST, planner="static", context_tokens=100)
    with pytest.raises(PlanError, match=r"context_tokens: .*at most 400 tokens"):
        plan_step([50, 150], cluster, COST, planner="static", context_tokens=401)
    with pytest.raises(ConfigError, match="context_tokens"):
        plan_step([50], cluster, COST, planner="static", context_tokens=0)


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 600), min_size=1, max_size=40),
    ranks=st.sampled_from([6, 7, 8, 12, 20]),
)
def test_static_plans_obey_every_rule(tokens: list[int], ranks: int) -> None:
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), COST, planner="static")
    check_plan(plan)
    makespan = score(plan, COST).makespan_seconds
    assert plan.notes["predicted_seconds"] == makespan
    assert plan.notes["bound_seconds"] <= makespan * (1 + 1e-9)
