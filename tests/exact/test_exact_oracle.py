"""The oracle against steps whose best end follows by hand, and against plans of the planner."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exact.oracle import plan_oracle
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, plain_cost
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import check_plan
from properties import costly

EXACT = {"relative_gap": 1e-9, "most_nodes": 10**6}
BESIDE = plain_cost(linear_seconds=1.0, fixed_seconds=100.0, ring_seconds=9.0)


@costly
@given(
    tokens=st.lists(st.integers(1, 45), min_size=1, max_size=3),
    ranks=st.sampled_from([2, 3]),
    capacity=st.integers(10, 30),
    quadratic=st.sampled_from([0.0, 1.0]),
    fixed=st.sampled_from([0.0, 100.0]),
)
def test_no_plan_of_the_planner_ends_before_the_oracles(tokens, ranks, capacity, quadratic, fixed):
    tokens = [min(length, ranks * capacity) for length in tokens]
    cost = plain_cost(quadratic_seconds=quadratic, linear_seconds=1.0, fixed_seconds=fixed, ring_seconds=9.0)
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    best = plan_oracle(tokens, cluster, cost, **EXACT)
    assert best.makespan_seconds == pytest.approx(score(best.plan, cost).makespan_seconds, rel=1e-6)
    assert best.bound_seconds == pytest.approx(best.makespan_seconds, rel=1e-6)
    planned = score(plan_step(tokens, cluster, cost, PlanOptions(layers=1)), cost)
    assert best.makespan_seconds <= planned.makespan_seconds * (1 + 1e-6)


@pytest.mark.parametrize(
    ("tokens", "ranks", "capacity", "cost", "least"),
    [
        # three rings of two on three ranks: each rank has 20 s of work, but no two rings fit at once
        ([20] * 3, 3, 10, plain_cost(linear_seconds=1.0, ring_seconds=1000.0), 3 * (10 + 1000 * 10)),
        ([30, 30], 3, 20, Cost(linear_seconds=1.0, fixed_seconds=99.0), 99 + 20),  # cut, in one pack
        ([6, 4, 21], 2, 20, BESIDE, 100 + (1 + 9) * 21 / 2 + 6),  # packs beside a ring save launches
        ([21, 17, 6], 2, 20, BESIDE, 100 + (1 + 9) * 44 / 2),  # 17 is too much beside: all are cut
        ([7, 5, 9, 3], 2, 12, plain_cost(linear_seconds=1.0, fixed_seconds=100.0), 100 + 12),  # no ring
    ],
)
def test_oracle_finds_the_best_of_all_plans(tokens, ranks, capacity, cost, least):
    best = plan_oracle(tokens, Cluster(ranks=ranks, capacity_tokens=capacity), cost, **EXACT)
    check_plan(best.plan)
    assert best.makespan_seconds == pytest.approx(least, rel=1e-6)


def test_oracle_refuses_what_is_not_tiny_and_tells_that_its_solver_is_missing(monkeypatch):
    with pytest.raises(PlanError, match="at most 8 ranks and 10 sequences; got 9 ranks and 1 sequences"):
        plan_oracle([5], Cluster(ranks=9, capacity_tokens=10), Cost(linear_seconds=1.0))
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match="pip install highspy"):
        plan_oracle([5], Cluster(ranks=2, capacity_tokens=10), Cost(linear_seconds=1.0))
