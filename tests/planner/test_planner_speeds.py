"""Ranks of unequal speed: equal ones plan the same, what plans for them cost, and how level they end."""

import random

import pytest
from testing.plans import make_plan

from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import check_plan

COST = plain_cost(quadratic_seconds=1.0, linear_seconds=500.0, fixed_seconds=20000.0, ring_seconds=90.0)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))


def test_equal_speeds_plan_the_same_bytes() -> None:
    tokens, cluster = (300, 120, 90, 10, 1, 1, 101), Cluster(ranks=6, capacity_tokens=100)

    def planned(cost, **options):
        return plan_step(tokens, cluster, cost, PlanOptions(planning_share=1e-6, **options))

    assert planned(COST, speeds=[1, 1.0] * 3).to_json() == planned(COST).to_json()
    twice, quick = planned(COST.at_speed(2.0)), planned(COST, speeds=[2.0] * 6)
    assert quick.microbatches == twice.microbatches
    assert quick.notes["predicted_seconds"] == pytest.approx(twice.notes["predicted_seconds"], rel=1e-12)
    assert quick.notes["bound_seconds"] == twice.notes["bound_seconds"]


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
