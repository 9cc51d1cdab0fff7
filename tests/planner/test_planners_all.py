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
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.planner import PLANNERS, PlanOptions, bound_seconds, plan_step, score
from lengthwise.program import check_plan
from properties import costly

CAPACITY = 29
RANKS = (1, 2, 3, 5, 6, 7, 12, 97)
FOUR = {"quadratic": 1.0, "linear": 500.0, "fixed": 20000.0, "ring": 90.0}
COST = plain_cost(**{f"{name}_seconds": value for name, value in FOUR.items()})
COSTS = (
    COST,
    Cost(quadratic_seconds=1.0, linear_seconds=32768.0),
    plain_cost(linear_seconds=1.0, hop_seconds=500.0),
    Cost(fixed_seconds=1.0),
    plain_cost(ring_seconds=1.0),
    all_terms_cost(named_shape("llama-7b"), named_hardware("h100")),
)
UGLY = st.sampled_from([1, 2, 3, 5, 23, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY - 1, 2 * CAPACITY + 1])


@st.composite
def steps(draw):
    """Draw ugly lengths on any ranks: mixed, one giant with many of one token, all alike, or fewer than ranks."""
    cluster = Cluster(ranks=draw(st.sampled_from(RANKS)), capacity_tokens=CAPACITY)
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
@given(step=steps(), cost=st.sampled_from(COSTS) | st.just(COST))
def test_planners_hold_every_rule(planner, step, cost):
    """Each sequence once, capacity, the bound, the judge's time, the same text again, four neighbours, no deadlock."""
    tokens, cluster = clip_for(planner, step[0], CAPACITY), step[1]
    plan = plan_step(tokens, cluster, cost, PlanOptions(planner=planner, layers=4))
    check_plan(plan)
    makespan = score(plan, cost).makespan_seconds
    assert plan.notes["predicted_seconds"] == makespan
    if cost is COST:
        assert judge(json.loads(plan.to_json()), Coefficients(**FOUR)) == pytest.approx(makespan, rel=1e-12)
    assert plan.notes["bound_seconds"] <= makespan * (1 + 1e-9)
    assert bound_seconds(tokens, cluster, cost, lone_rings=False) <= makespan * (1 + 1e-9)
    again = Plan.from_json(plan.to_json())
    assert (again, again.to_json(), again.notes["planner"]) == (plan, plan.to_json(), planner)
    assert plan_step(tokens, cluster, cost, PlanOptions(planner=planner, layers=4)).digest() == again.digest()
    for piece in (piece for microbatch in plan.microbatches for piece in microbatch.pieces):
        assert sorted(piece.ranks) == list(range(min(piece.ranks), min(piece.ranks) + piece.degree))
        hops = zip(piece.ranks, (*piece.ranks[1:], piece.ranks[0]), strict=True)
        assert piece.degree == 1 or all(1 <= abs(there - here) <= 2 for here, there in hops)
    if cluster.ranks <= 7:
        matched = check_order(plan, layers=2)
        assert (matched > 0) == any(piece.degree > 1 for m in plan.microbatches for piece in m.pieces)
