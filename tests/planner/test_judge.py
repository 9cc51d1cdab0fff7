"""The judge of `benchmarks/`, which shares no code with the package, against the package's score, check and bound."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import draw_lengths, random_plan

from judge import Coefficients, broken_rules, judge
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.plan import Plan
from lengthwise.cost import Cost, plain_cost
from lengthwise.planner import score
from lengthwise.program import check_plan

FOUR = st.tuples(
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 40.0]),
    st.sampled_from([0.0, 100.0, 3000.0]),
    st.sampled_from([0.0, 9.0, 200.0]),
)


def _costs(four: tuple[float, float, float, float]) -> tuple[Cost, Coefficients]:
    q, linear, g, c = four
    return (
        plain_cost(quadratic_seconds=q, linear_seconds=linear, fixed_seconds=g, ring_seconds=c),
        Coefficients(quadratic=q, linear=linear, fixed=g, ring=c),
    )


def _file(plan: Plan) -> dict:
    return json.loads(plan.to_json())


def test_judge_times_a_plan_by_hand() -> None:
    plan = {
        "ranks": 3,
        "capacity": 100,
        "tokens": [5, 40, 7, 6],
        "schedule": {"kind": "free"},
        "microbatches": [
            {"ranks": [0], "sequences": [0]},
            {"pieces": [{"ranks": [0, 1], "sequences": [1]}, {"ranks": [1], "sequences": [3]}]},
            {"ranks": [2], "sequences": [2]},
        ],
    }
    cost = Coefficients(quadratic=1.0, linear=2.0, fixed=10.0, ring=60.0)
    first, ring, beside = 10 + 25 + 10, (1600 + 80) / 2 + (60 * 40 - 1600) / 2, 36 + 12
    assert judge(plan, cost) == first + 10 + ring + beside
    plan["schedule"]["kind"] = "waves"
    assert judge(plan, cost) == first + 10 + ring + beside + (10 + 49 + 14)


@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 3, 5, 7]), four=FOUR, waves=st.booleans())
def test_judge_agrees_with_score_on_plans_that_no_planner_makes(seed, ranks, four, waves):
    choose = random.Random(seed)
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, choose.randint(1, 9)), shares=False)
    plan = Plan.from_json(plan.to_json().replace('"kind": "free"', '"kind": "waves"')) if waves else plan
    cost, coefficients = _costs(four)
    assert judge(_file(plan), coefficients) == pytest.approx(score(plan, cost).makespan_seconds, rel=1e-12)


@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 3, 5, 7]), capacity=st.integers(1, 60))
def test_judge_and_check_plan_refuse_the_same_plans(seed: int, ranks: int, capacity: int) -> None:
    choose = random.Random(seed)
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, choose.randint(1, 9)), shares=False)
    raw = {**_file(plan), "capacity": capacity}
    if choose.random() < 0.3:
        raw["microbatches"].pop(choose.randrange(len(raw["microbatches"])))
    if choose.random() < 0.3:
        raw["microbatches"].append({"ranks": [choose.randint(0, ranks)], "sequences": [0]})
    try:
        check_plan(Plan.from_json(json.dumps(raw)))
        refused = False
    except LengthwiseError:
        refused = True
    assert refused == any(True for _ in broken_rules(raw))
