"""What holds for every planner: each sequence once, capacity, one order, no deadlock, the bound."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing.order import check_order
from testing.plans import clip_for

from judge import Coefficients, judge
from lengthwise.core.plan import RECOMPUTE_KINDS, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.planner import PLANNERS, PlanOptions, bound_seconds, plan_step, score
from lengthwise.planner.problem.speeds import noted_speeds, read_speeds
from lengthwise.program import check_plan
from properties import costly

CAPACITY = 29
KINDS = (*RECOMPUTE_KINDS, "none+1/4", "elementwise+3/4")
FOUR = {"quadratic": 1.0, "linear": 500.0, "fixed": 20000.0, "ring": 90.0}
COST = plain_cost(**{f"{name}_seconds": value for name, value in FOUR.items()})
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
COSTS = (
    Cost(quadratic_seconds=1.0, linear_seconds=32768.0),
    plain_cost(quadratic_seconds=1.0, linear_seconds=500.0, ring_seconds=2000.0, hop_seconds=300.0),
    Cost(fixed_seconds=1.0),
    plain_cost(ring_seconds=1.0),
    ALL_TERMS,
)
UGLY = st.sampled_from([1, 2, 3, 5, 23, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY - 1, 2 * CAPACITY + 1])
SPEED = st.sampled_from([0.5, 1.0]) | st.floats(0.1, 3.0)


@st.composite
def steps(draw):
    """Draw ugly lengths on any ranks: mixed, one giant with many of one token, all alike, or fewer than ranks."""
    cluster = Cluster(ranks=draw(st.sampled_from([1, 2, 3, 5, 6, 7, 12])), capacity_tokens=CAPACITY)
    kind = draw(st.sampled_from(["mixed", "giant", "alike", "few"]))
    if kind == "giant":
        lengths = [cluster.longest_tokens] + [1] * draw(st.integers(0, 60))
    elif kind == "alike":
        lengths = [draw(UGLY)] * draw(st.integers(1, 40))
    else:
        lengths = draw(st.lists(UGLY | st.integers(1, 700), min_size=1, max_size=3 if kind == "few" else 40))
    are_unequal = cluster.ranks <= 13 and draw(st.booleans())
    speeds = draw(st.lists(SPEED, min_size=cluster.ranks, max_size=cluster.ranks)) if are_unequal else None
    return [min(length, cluster.longest_tokens) for length in lengths], cluster, speeds


@pytest.mark.parametrize("planner", PLANNERS)
@costly
@given(step=steps(), cost=st.sampled_from(COSTS) | st.just(COST), recompute=st.sampled_from(KINDS))
@example(([41 * CAPACITY] + [1] * 40, Cluster(ranks=41, capacity_tokens=CAPACITY), None), COSTS[0], "none")
@example(([60, 45], Cluster(ranks=3, capacity_tokens=CAPACITY), [1.0, 0.4, 1.0]), ALL_TERMS, "layer")  # makes shares
@example(
    ([60, 45, 7] * 3, Cluster(ranks=13, capacity_tokens=CAPACITY), [1 + i / 9 for i in range(13)]), ALL_TERMS, "none"
)
def test_planners_hold_every_rule(planner, step, cost, recompute):
    """On ranks of equal and unequal speed, with any recomputation."""
    tokens, cluster, speeds = clip_for(planner, step[0], CAPACITY), *step[1:]
    options = PlanOptions(planner=planner, layers=4, speeds=speeds, recompute=recompute, planning_share=1e-6)
    plan, priced = plan_step(tokens, cluster, cost, options), cost.recomputing(recompute)
    check_plan(plan)
    makespan = score(plan, cost, speeds=speeds).makespan_seconds
    assert plan.notes["predicted_seconds"] == makespan == score(plan, cost).makespan_seconds
    assert score(plan, priced, speeds=speeds).makespan_seconds == pytest.approx(makespan)
    if cost is COST and recompute == "none" and not plan.requires:
        assert judge(json.loads(plan.to_json()), Coefficients(**FOUR)) == pytest.approx(makespan, rel=1e-12)
    assert plan.notes["bound_seconds"] <= makespan * (1 + 1e-9)
    assert bound_seconds(tokens, cluster, priced, lone_rings=False, speeds=speeds) <= makespan * (1 + 1e-9)
    again = Plan.from_json(plan.to_json())
    assert (again, again.to_json(), again.notes["planner"]) == (plan, plan.to_json(), planner)
    assert speeds is None or noted_speeds(plan) == read_speeds(speeds, cluster.ranks)
    for piece in (piece for microbatch in plan.microbatches for piece in microbatch.pieces):
        assert sorted(piece.ranks) == list(range(min(piece.ranks), min(piece.ranks) + piece.degree))
        hops = zip(piece.ranks, (*piece.ranks[1:], piece.ranks[0]), strict=True)
        assert piece.degree == 1 or all(1 <= abs(there - here) <= 2 for here, there in hops)
    if cluster.ranks <= 7:
        matched = check_order(plan, layers=2)
        assert (matched > 0) == any(piece.degree > 1 for m in plan.microbatches for piece in m.pieces)
