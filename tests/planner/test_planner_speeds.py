"""Ranks of unequal speed: what users may write, what plans for them cost, and that no plan beats the bound."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing.order import check_order
from testing.plans import clip_for, make_plan

from judge import Coefficients, judge
from lengthwise.core.errors import PlanError, Problems
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PLANNERS, PlanOptions, bound_seconds, plan_step, score
from lengthwise.planner.problem.speeds import noted_speeds, read_speeds
from lengthwise.planner.problem.topology import levelled
from lengthwise.program import check_plan, ring_order
from lengthwise.simulator import simulate_plan
from properties import costliest
from tiers import some

CAPACITY = 29
FOUR = {"quadratic": 1.0, "linear": 500.0, "fixed": 20000.0, "ring": 90.0}
COST = plain_cost(**{f"{name}_seconds": value for name, value in FOUR.items()})
HOPS = plain_cost(quadratic_seconds=1.0, linear_seconds=500.0, ring_seconds=2000.0, hop_seconds=300.0)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
UGLY = st.sampled_from([1, 2, 3, 5, 23, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY - 1, 2 * CAPACITY + 1])
SPEED = st.sampled_from([0.5, 1.0]) | st.floats(0.1, 3.0)


@st.composite
def uneven_steps(draw: st.DrawFn, most_ranks: int = 13) -> tuple[list[int], Cluster, list[float]]:
    cluster = Cluster(ranks=draw(st.integers(1, most_ranks)), capacity_tokens=CAPACITY)
    lengths = draw(st.lists(UGLY | st.integers(1, 400), min_size=1, max_size=25))
    speeds = draw(st.lists(SPEED, min_size=cluster.ranks, max_size=cluster.ranks))
    return [min(length, cluster.longest_tokens) for length in lengths], cluster, speeds


@pytest.mark.parametrize("planner", PLANNERS)
@costliest
@given(step=uneven_steps(), cost=st.sampled_from([COST, HOPS, ALL_TERMS]), recompute=st.sampled_from(RECOMPUTE_KINDS))
@example(([60, 45], Cluster(ranks=3, capacity_tokens=CAPACITY), [1.0, 0.4, 1.0]), ALL_TERMS, "layer")  # makes shares
@example(
    ([60, 45, 7] * 3, Cluster(ranks=13, capacity_tokens=CAPACITY), [1 + i / 9 for i in range(13)]), ALL_TERMS, "none"
)
def test_planners_hold_every_rule_on_ranks_of_unequal_speed(planner, step, cost, recompute):
    tokens, cluster, speeds = step
    tokens = clip_for(planner, tokens, CAPACITY)
    options = PlanOptions(planner=planner, speeds=speeds, recompute=recompute)
    plan = plan_step(tokens, cluster, cost, options)
    recomputing = cost.recomputing(recompute)  # what drafts are scored with
    check_plan(plan)
    makespan = score(plan, cost, speeds=speeds).makespan_seconds
    assert plan.notes["predicted_seconds"] == makespan == score(plan, cost).makespan_seconds
    assert score(plan, recomputing, speeds=speeds).makespan_seconds == pytest.approx(makespan)
    assert plan.notes["bound_seconds"] <= makespan * (1 + 1e-9)
    assert bound_seconds(tokens, cluster, recomputing, lone_rings=False, speeds=speeds) <= makespan * (1 + 1e-9)
    if cost is COST and recompute == "none" and not plan.requires:
        assert judge(json.loads(plan.to_json()), Coefficients(**FOUR)) == pytest.approx(makespan, rel=1e-12)
    assert Plan.from_json(plan.to_json()) == plan
    assert noted_speeds(plan) == read_speeds(speeds, cluster.ranks)
    assert plan_step(tokens, cluster, cost, options).digest() == plan.digest()
    if cluster.ranks <= 7:
        assert (check_order(plan, layers=2) > 0) == any(p.degree > 1 for m in plan.microbatches for p in m.pieces)
    peers: dict[int, set[int]] = {}
    for piece in (piece for microbatch in plan.microbatches for piece in microbatch.pieces if piece.degree > 1):
        for here, there in zip(piece.ranks, (*piece.ranks[1:], piece.ranks[0]), strict=True):
            peers.setdefault(here, set()).add(there)
            peers.setdefault(there, set()).add(here)
    assert all(len(met) <= 4 for met in peers.values())


@pytest.mark.parametrize("planner", ["lengthwise", "bytescale"])
def test_equal_speeds_plan_the_same_bytes(planner: str) -> None:
    tokens, cluster = (300, 120, 90, 55, 10, 7, 1, 1, 99, 230, 101), Cluster(ranks=6, capacity_tokens=100)

    def planned(cost, **options):
        return plan_step(tokens, cluster, cost, PlanOptions(planner=planner, **options))

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


def test_score_lets_shares_level_a_ring_of_unequal_ranks() -> None:
    plain, shared = (
        score(make_plan(2, (60_000,), [piece]), ALL_TERMS, speeds=[1.0, 0.5]).makespan_seconds
        for piece in (Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(0, 1), sequences=(0,), shares=(2.0, 1.0)))
    )
    assert shared == pytest.approx(plain * 0.5 / 0.75, rel=1e-3)


@given(speeds=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=9), room=st.floats(0.3, 3.0))
def test_levelled_parts_end_as_early_as_any_that_fit(speeds: list[float], room: float) -> None:
    most = room / len(speeds)
    parts, ends = levelled(np.array([speeds]), most)
    assert parts.sum() == pytest.approx(1)
    assert ends[0] == pytest.approx(max(parts[0] / speeds))
    if room <= 1:
        assert parts[0].tolist() == [1 / len(speeds)] * len(speeds)
        return
    assert parts.max() <= most * (1 + 1e-9)
    could = sum(min(most, speed * ends[0] * (1 - 1e-6)) for speed in speeds)
    assert could < 1  # sooner, even with every rank busy until then or full, something is left over


@pytest.mark.parametrize("recipe", some(["prolong", "wikipedia"], 0))
def test_plan_step_levels_ranks_of_unequal_speed(recipe: str) -> None:
    """64 ranks at random half as fast as the others: with shares, and packs by speed, as good as on equal ranks."""
    cluster = Cluster(ranks=64, capacity_tokens=8192)
    choose = random.Random(0)
    speeds = [choose.choice((1.0, 0.5)) for _ in range(64)]
    tokens = draw_lengths(recipe, 2**23, 0, longest_tokens=400_000)
    plan = plan_step(tokens, cluster, ALL_TERMS, PlanOptions(speeds=speeds))
    check_plan(plan)
    assert "shares" in plan.requires
    assert plan.notes["predicted_seconds"] <= 1.02 * plan.notes["bound_seconds"]
    blind = score(plan_step(tokens, cluster, ALL_TERMS), ALL_TERMS, speeds=speeds).makespan_seconds
    assert blind > 1.3 * plan.notes["predicted_seconds"]


@pytest.mark.parametrize("note", [[[2, 1.0]], [[3, 0]], [[1.5, 1], [1.5, 1]], "fast", [3, 1.0], [[3, 1.0, 2]], {}])
def test_score_refuses_a_note_of_speeds_that_is_none(note: object) -> None:
    plan = make_plan(3, (5,), [Piece(ranks=(0,), sequences=(0,))])
    with pytest.raises(PlanError, match="speeds"):
        score(Plan.from_json(plan.to_json()[:-2] + f', "speeds": {json.dumps(note)}}}'), COST)


def test_simulate_plan_refuses_ranks_of_unequal_speed() -> None:
    plan = plan_step([5000, 600], Cluster(ranks=2, capacity_tokens=4096), ALL_TERMS, PlanOptions(speeds=[1, 0.5]))
    with pytest.raises(PlanError, match="unequal ranks"):
        simulate_plan(plan, ALL_TERMS)
