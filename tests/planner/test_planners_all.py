"""What holds for every planner: each sequence once, capacity, one order, no deadlock, the bound, determinism."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.order import check_order
from testing.plans import clip_for

from judge import Coefficients, judge
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PLANNERS, PlanOptions, bound_seconds, plan_step, score
from lengthwise.program import check_plan
from properties import costliest, costly

CAPACITY = 29
RANKS = (1, 2, 3, 5, 6, 7, 12, 97)
FOUR = {"quadratic": 1.0, "linear": 500.0, "fixed": 20000.0, "ring": 90.0}
COST = Cost(**{f"{name}_seconds": value for name, value in FOUR.items()})
COSTS = (
    COST,
    Cost(quadratic_seconds=1.0, linear_seconds=32768.0),
    Cost(linear_seconds=1.0, hop_seconds=500.0),
    Cost(fixed_seconds=1.0),
    Cost(ring_seconds=1.0),
    all_terms_cost(named_shape("llama-7b"), named_hardware("h100")),
)
UGLY = st.sampled_from([1, 2, 3, 5, 23, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY - 1, 2 * CAPACITY + 1])


@st.composite
def steps(draw: st.DrawFn, ranks: st.SearchStrategy[int]) -> tuple[list[int], Cluster]:
    """Draw ugly lengths on any ranks: mixed, one giant with many of one token, all alike, or fewer than ranks."""
    cluster = Cluster(ranks=draw(ranks), capacity_tokens=CAPACITY)
    kind = draw(st.sampled_from(["mixed", "giant", "alike", "few"]))
    if kind == "giant":
        return [cluster.longest_tokens] + [1] * draw(st.integers(0, 60)), cluster
    if kind == "alike":
        length = min(draw(UGLY), cluster.longest_tokens)
        return [length] * draw(st.integers(1, 40)), cluster
    lengths = draw(st.lists(UGLY | st.integers(1, 700), min_size=1, max_size=3 if kind == "few" else 40))
    return [min(length, cluster.longest_tokens) for length in lengths], cluster


@pytest.mark.parametrize("planner", PLANNERS)
@costly
@given(step=steps(st.sampled_from(RANKS)))
def test_planners_plan_every_sequence_once_within_capacity_and_above_the_bound(
    planner: str, step: tuple[list[int], Cluster]
) -> None:
    tokens, cluster = step
    tokens = clip_for(planner, tokens, CAPACITY)
    plan = plan_step(tokens, cluster, COST, PlanOptions(planner=planner, layers=4))
    check_plan(plan)
    makespan = judge(json.loads(plan.to_json()), Coefficients(**FOUR))
    assert plan.notes["predicted_seconds"] == pytest.approx(makespan, rel=1e-12)
    assert plan.notes["bound_seconds"] <= makespan * (1 + 1e-9)
    assert bound_seconds(tokens, cluster, COST, lone_rings=False) <= makespan * (1 + 1e-9)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_step(tokens, cluster, COST, PlanOptions(planner=planner, layers=4)).digest() == plan.digest()


@pytest.mark.parametrize("planner", PLANNERS)
@costliest
@given(step=steps(st.sampled_from([1, 2, 3, 5, 6, 7])))
def test_planners_never_let_ranks_wait_for_each_other_for_ever(planner: str, step: tuple[list[int], Cluster]) -> None:
    tokens, cluster = step
    tokens = clip_for(planner, tokens, CAPACITY)
    plan = plan_step(tokens, cluster, COST, PlanOptions(planner=planner))
    matched = check_order(plan, layers=2)
    assert (matched > 0) == any(piece.degree > 1 for m in plan.microbatches for piece in m.pieces)


@pytest.mark.parametrize("planner", PLANNERS)
@costly
@given(step=steps(st.sampled_from(RANKS)), cost=st.sampled_from(COSTS))
def test_planners_meet_four_neighbours_at_most(planner: str, cost: Cost, step: tuple[list[int], Cluster]) -> None:
    tokens, cluster = step
    tokens = clip_for(planner, tokens, CAPACITY)
    plan = plan_step(tokens, cluster, cost, PlanOptions(planner=planner))
    check_plan(plan)
    assert score(plan, cost).makespan_seconds == plan.notes["predicted_seconds"]
    assert plan.notes["bound_seconds"] <= plan.notes["predicted_seconds"] * (1 + 1e-9)
    assert bound_seconds(tokens, cluster, cost, lone_rings=False) <= plan.notes["predicted_seconds"] * (1 + 1e-9)
    for microbatch in plan.microbatches:
        for piece in microbatch.pieces:
            assert sorted(piece.ranks) == list(range(min(piece.ranks), min(piece.ranks) + piece.degree))
            if piece.degree > 1:
                hops = zip(piece.ranks, (*piece.ranks[1:], piece.ranks[0]), strict=True)
                assert all(1 <= abs(there - here) <= 2 for here, there in hops)
