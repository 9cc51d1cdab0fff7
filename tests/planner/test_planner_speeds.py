"""Ranks of unequal speed: what users may write, what plans for them cost, and that no plan beats the bound."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import make_plan

from lengthwise.core.errors import PlanError, Problems
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, bound_seconds, plan_step, score
from lengthwise.program import check_plan, ring_order

COST = plain_cost(quadratic_seconds=1.0, linear_seconds=500.0, fixed_seconds=20000.0, ring_seconds=90.0)
HOPS = plain_cost(quadratic_seconds=1.0, linear_seconds=500.0, ring_seconds=2000.0, hop_seconds=300.0)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
SPEED = st.sampled_from([0.5, 1.0]) | st.floats(0.1, 3.0)


def test_equal_speeds_plan_the_same_bytes() -> None:
    tokens, cluster = (300, 120, 90, 10, 1, 1, 101), Cluster(ranks=6, capacity_tokens=100)

    def planned(cost, **options):
        return plan_step(tokens, cluster, cost, PlanOptions(planning_share=1e-6, **options))

    assert planned(COST, speeds=[1, 1.0] * 3).to_json() == planned(COST).to_json()
    twice, quick = planned(COST.at_speed(2.0)), planned(COST, speeds=[2.0] * 6)
    assert quick.microbatches == twice.microbatches
    assert quick.notes["predicted_seconds"] == pytest.approx(twice.notes["predicted_seconds"], rel=1e-12)
    assert quick.notes["bound_seconds"] == twice.notes["bound_seconds"]


@given(data=st.data(), ranks=st.integers(1, 9), cost=st.sampled_from([COST, HOPS, ALL_TERMS]))
def test_no_plan_of_lone_rings_beats_the_bound_of_unequal_speeds(data: st.DataObject, ranks: int, cost: Cost) -> None:
    """Plans at random: any intervals, any order, and any shares that ranks can hold."""
    cluster = Cluster(ranks=ranks, capacity_tokens=40)
    tokens = data.draw(st.lists(st.integers(1, 40 * ranks), min_size=1, max_size=6))
    speeds = data.draw(st.lists(SPEED, min_size=ranks, max_size=ranks))
    pieces = []
    for i in data.draw(st.permutations(range(len(tokens)))):
        degree = data.draw(st.integers(-(-tokens[i] // 40), ranks))
        first = data.draw(st.integers(0, ranks - degree))
        kind = data.draw(st.sampled_from(["equal", "speeds", "any"]))
        where = ring_order(first, degree)
        shares = {
            "equal": None,
            "speeds": tuple(speeds[rank] for rank in where),
            "any": tuple(data.draw(st.floats(0.5, 2)) for _ in where),
        }[kind]
        pieces.append(Piece(ranks=where, sequences=(i,), shares=shares))
    plan = replace(make_plan(ranks, tokens, pieces), capacity=40)
    try:
        check_plan(plan)
    except (PlanError, Problems):
        return  # shares that a rank cannot hold
    least = bound_seconds(tokens, cluster, cost, speeds=speeds)
    assert least <= score(plan, cost, speeds=speeds).makespan_seconds * (1 + 1e-9)


def test_score_lets_a_ring_wait_for_its_slowest_rank() -> None:
    cost = plain_cost(linear_seconds=1.0, fixed_seconds=10.0, ring_seconds=3.0)
    ring, pack = Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1,))
    slowest = (60 / 3 + 10) / 0.5 + 3.0 * 60 * 2 / 3  # transfers are as long as on any rank
    scored = score(make_plan(3, (60, 8), [ring, pack]), cost, speeds=[1, 2, 0.5])
    assert scored.busy_seconds == (slowest, slowest + (8 + 10) / 2, slowest)
    beside = make_plan(3, (60, 8), [[ring, pack]])
    assert score(beside, cost, speeds=[1, 2, 0.5]).busy_seconds == (slowest, slowest + 8 / 2, slowest)


def test_plan_step_levels_ranks_of_unequal_speed() -> None:
    """64 ranks at random half as fast as the others: with shares, and packs by speed, as good as on equal ranks."""
    cluster, choose = Cluster(ranks=64, capacity_tokens=8192), random.Random(0)
    speeds = [choose.choice((1.0, 0.5)) for _ in range(64)]
    tokens = draw_lengths("prolong", 2**23, 0, longest_tokens=400_000)
    plan = plan_step(tokens, cluster, ALL_TERMS, PlanOptions(speeds=speeds))
    check_plan(plan)
    assert "shares" in plan.requires
    assert plan.notes["predicted_seconds"] <= 1.02 * plan.notes["bound_seconds"]
    blind = score(plan_step(tokens, cluster, ALL_TERMS), ALL_TERMS, speeds=speeds).makespan_seconds
    assert blind > 1.3 * plan.notes["predicted_seconds"]
