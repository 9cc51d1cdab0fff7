"""The score of plans: the clock of every rank by hand, and as the judge of benchmarks has it; ranks of other speeds."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.pipelines import as_pipeline
from testing.plans import draw_lengths, make_plan, random_plan

from judge import Coefficients, broken_rules, judge
from lengthwise.core.errors import LengthwiseError, PlanError
from lengthwise.core.plan import Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choice, Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data import recipes
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import check_plan, ring_order

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


COST = Cost(linear_seconds=1.0, fixed_seconds=10.0)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))


def ring(ranks, *sequences, **changes):
    return Piece(ranks=tuple(ranks), sequences=sequences, **changes)


def changed(plan, **changes):
    """Return a plan of one microbatch with another offload or recomputation."""
    return replace(plan, microbatches=(replace(plan.microbatches[0], **changes),))


def test_score_starts_a_ring_when_its_last_rank_is_free_and_counts_idle_ranks():
    scored = score(make_plan(3, (5, 40, 7), [ring([0], 0), ring([0, 1], 1), ring([2], 2)]), COST)
    assert scored.busy_seconds == (15 + 30, 30, 17)
    assert scored.makespan_seconds == 15 + 30
    assert scored.idle_ratio == pytest.approx(1 - (45 + 30 + 17) / 3 / 45)
    assert (scored.ring_tokens, scored.ring_token_ratio) == (40, 40 / 52)
    apart = make_plan(3, (5, 50, 6), [ring([0], 0), ring([1], 1), ring([0], 2)])
    assert score(apart, COST).makespan_seconds == 60
    assert score(make_plan(4, (5,), [ring([0], 0)]), COST).idle_ratio == 0.75


@pytest.mark.parametrize(
    ("said", "piece", "offload", "speeds"),
    [
        ("offload", {}, 0.5, None),
        ("heads", {"heads": 2}, 0.0, None),
        *(("speeds", {}, 0.0, note) for note in ([[1, 1.0]], [[2, 0]], "fast", [[2, 1.0, 2]], {})),
    ],
)
def test_score_refuses_what_its_costs_do_not_tell_and_what_are_no_speeds(said, piece, offload, speeds):
    plan = changed(make_plan(2, (20,), [ring([0, 1], 0, **piece)], layers=4), offload=offload)
    plan = plan if speeds is None else replace(plan, notes={"speeds": speeds})
    with pytest.raises(PlanError, match=said):
        score(plan, COST)


def test_score_of_a_pipeline_runs_its_stages():
    plan = make_plan(2, (20,) * 8, [ring([rank], 2 * i + rank) for i in range(4) for rank in (0, 1)])
    scored = score(as_pipeline(plan, 4, 2), COST)
    assert scored.makespan_seconds == pytest.approx(30 / 2 * (4 * 2 + 3))
    assert scored.busy_seconds == (120, 120)
    assert score(as_pipeline(plan, 1, 2), COST).makespan_seconds == 120
    staged = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"), stages=4)
    alone = staged.piece_seconds([5000], 1) + staged.fixed_seconds
    equal = make_plan(2, (5000,) * 4, [ring([0], i) for i in range(4)], layers=32)
    for virtual, fill in ((1, 3.0), (2, 1.5)):
        assert score(as_pipeline(equal, 4, virtual), staged).makespan_seconds == pytest.approx(alone * (4 + fill))
    assert score(equal, staged).makespan_seconds == pytest.approx(alone * (4 + 3)), "stages of the costs fill, too"


def test_score_prices_where_a_ring_is():
    cost = all_terms_cost(replace(named_shape("llama-7b"), kv_heads=32), named_hardware("h100"))
    inside, across = (make_plan(16, (20_000,), [ring(ring_order(first, 4), 0)], layers=32) for first in (4, 6))
    assert score(inside, cost).makespan_seconds < score(across, cost).makespan_seconds


def test_score_prices_what_a_plan_asks_for():
    ranks, seconds = tuple(range(16)), []
    for asked, launches in (({}, 1), ({"heads": 4}, 1), ({"offload": 1.0}, 1), ({"recompute": "layer"}, 4 / 3)):
        heads = {"heads": asked["heads"]} if "heads" in asked else {}
        plan = make_plan(16, (30_000,), [ring(ranks, 0, **heads)], layers=32)
        plan = plan if heads else changed(plan, **asked)
        alone = ALL_TERMS.piece_seconds([30_000], 16, Choice(**asked), ranks=ranks)
        seconds.append(score(plan, ALL_TERMS).makespan_seconds)
        assert seconds[-1] == pytest.approx(alone + launches * ALL_TERMS.fixed_seconds), asked
    shares = make_plan(16, (30_000,), [ring(ranks, 0, shares=(2.0,) * 8 + (1.0,) * 8)], layers=32)
    seconds.append(score(shares, ALL_TERMS).makespan_seconds)
    assert len({round(each, 9) for each in seconds}) == 5


FOUR_TERMS = plain_cost(quadratic_seconds=1.0, linear_seconds=500.0, fixed_seconds=20000.0, ring_seconds=90.0)


def test_equal_speeds_plan_the_same_bytes() -> None:
    tokens, cluster = (300, 120, 90, 10, 1, 1, 101), Cluster(ranks=6, capacity_tokens=100)

    def planned(cost, **options):
        return plan_step(tokens, cluster, cost, PlanOptions(planning_share=1e-6, **options))

    assert planned(FOUR_TERMS, speeds=[1, 1.0] * 3).to_json() == planned(FOUR_TERMS).to_json()
    twice, quick = planned(FOUR_TERMS.at_speed(2.0)), planned(FOUR_TERMS, speeds=[2.0] * 6)
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
    tokens = recipes.draw_lengths("prolong", 2**23, 0, longest_tokens=400_000)
    plan = plan_step(tokens, cluster, ALL_TERMS, PlanOptions(speeds=speeds))
    check_plan(plan)
    assert "shares" in plan.requires
    assert plan.notes["predicted_seconds"] <= 1.02 * plan.notes["bound_seconds"]
    blind = score(plan_step(tokens, cluster, ALL_TERMS), ALL_TERMS, speeds=speeds).makespan_seconds
    assert blind > 1.3 * plan.notes["predicted_seconds"]
