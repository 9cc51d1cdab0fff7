"""Planners of others, as they were published: fixed mesh, one degree, whole packs, ByteScale, powers of two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines import bytescale
from lengthwise.planner.baselines.single_degree import first_fit_packs, least_seconds, plan_single_degree, schedule_at
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan

LINEAR = Cost(linear_seconds=1.0)
FOUR_TERMS = plain_cost(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))


def planned(planner, tokens, ranks, capacity, cost=LINEAR, **options):
    """Return a plan, and of each microbatch the ranks and sequences of its pieces."""
    options = PlanOptions(planner=planner, **options)
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=capacity), cost, options)
    return plan, [[(sorted(piece.ranks), piece.sequences) for piece in m.pieces] for m in plan.microbatches]


@pytest.mark.parametrize(
    ("tokens", "ranks", "ring_seconds", "cp", "seconds"),
    [
        ([150, 150, 150], 7, 2.0, 2, 75.0 + 150),  # three groups of the exact size, one rank idle
        ([450, 450, 450, 450], 12, 0.0, 6, 150.0),  # two groups either way: of 6 ranks it is quicker than of 5
        ([250] * 4, 11, 0.3, 4, 2 * (250 / 4 + 0.3 * 250 * 3 / 4)),  # two groups of 4; of three of 3 one has two
    ],
)
def test_static_takes_the_mesh_that_ends_first(tokens, ranks, ring_seconds, cp, seconds):
    plan, _ = planned("static", tokens, ranks, 100, plain_cost(linear_seconds=1.0, ring_seconds=ring_seconds))
    assert {microbatch.pieces[0].degree for microbatch in plan.microbatches} == {cp}
    assert plan.notes["predicted_seconds"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("tokens", "context", "expected"),
    [
        ([150, 60, 150, 40, 150], 200, [([0, 1], (0, 3)), ([2, 3], (1,)), ([0, 1], (2,)), ([2, 3], (4,))]),
        ([50, 60], 400, [([0, 1, 2, 3], (0, 1))]),  # the mesh is of the context, also without long sequences
        ([25] * 8, 50, [([rank], (2 * rank, 2 * rank + 1)) for rank in range(4)]),  # and so are packs
    ],
)
def test_static_packs_in_data_order_and_deals_in_turn(tokens, context, expected):
    _, pieces = planned("static", tokens, 4, 100, FOUR_TERMS, context_tokens=context)
    assert [piece for (piece,) in pieces] == expected


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 500), min_size=1, max_size=30),
    ranks=st.sampled_from([5, 6, 7, 12, 13]),
    cost=st.sampled_from([LINEAR, FOUR_TERMS, plain_cost(linear_seconds=1.0, ring_seconds=2.0, hop_seconds=3.0)]),
)
def test_single_degree_is_the_best_of_all_degrees(tokens: list[int], ranks: int, cost: Cost) -> None:
    request = PlanRequest(tokens=tuple(tokens), cluster=Cluster(ranks=ranks, capacity_tokens=100), cost=cost)
    tried = [schedule_at(request, degree) for degree in range(-(-max(tokens) // 100), ranks + 1)]
    for one in tried:
        assert least_seconds(request, one.degree) <= one.makespan_seconds
    best = min(tried, key=lambda one: (one.makespan_seconds, one.degree))
    assert {microbatch.pieces[0].degree for microbatch in plan_single_degree(request)} == {best.degree}


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 100), min_size=1, max_size=30),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    cost=st.sampled_from([FOUR_TERMS, ALL_TERMS]),
)
def test_packed_dp_cuts_nothing_and_ends_no_later_than_packs_in_data_order(tokens, ranks, cost):
    plan, _ = planned("packed-dp", tokens, ranks, 100, cost, layers=32)
    check_plan(plan)
    assert {piece.degree for each in plan.microbatches for piece in each.pieces} == {1}
    loads = [0.0] * ranks
    packs = [[tokens[i] for i in pack] for pack in first_fit_packs(np.array(tokens), 100)]
    for seconds in sorted((cost.fixed_seconds + cost.piece_seconds(pack, 1) for pack in packs), reverse=True):
        loads[loads.index(min(loads))] += seconds
    assert plan.notes["predicted_seconds"] <= max(loads) * (1 + 1e-12)


def test_packed_dp_holds_more_than_all_ranks_with_offload() -> None:
    plan, _ = planned("packed-dp", [40_000, 700, 8000], 3, 8192, ALL_TERMS, layers=32, offload="auto")
    check_plan(plan)
    assert {each.pieces[0].degree for each in plan.microbatches} == {1}
    assert max(each.offload for each in plan.microbatches) > 0.5


def test_bytescale_keeps_the_strategy_that_ends_first(monkeypatch) -> None:
    cost = all_terms_cost(named_shape("llama-7b"), named_hardware("h100").with_kernel("flash2"))
    tokens, took, both = draw_lengths("github", 2**21, 0, longest_tokens=100_000), {}, ("dp-balance", "pp-balance")
    for tried in (both[:1], both[1:], both, both[::-1]):
        monkeypatch.setattr(bytescale, "STRATEGIES", tried)
        took[tried] = planned("bytescale", tokens, 24, 8192, cost)[0].notes["predicted_seconds"]
    assert took[both] == took[both[::-1]] == min(took.values()) < max(took.values())


def test_bytescale_naive_deals_long_ones_in_order_and_fills_rounds_with_packs() -> None:
    plan, pieces = planned("bytescale-naive", [150, 60, 250, 40, 30, 70], 4, 100)
    assert [piece for (piece,) in pieces] == [([0, 1], (0,)), ([2], (5, 4)), ([3], (1, 3)), ([0, 1, 2], (2,))]
    assert plan.notes["predicted_seconds"] == pytest.approx(100 + 250 / 3)


def test_power_of_two_is_what_megatron_core_0_16_plans() -> None:
    """The two sub-batches that its `BalancedCPScheduler` returned for these lengths."""
    assert planned("power-of-two", [20000, 512, 700, 60000, 900], 8, 8192)[1] == [
        [(list(range(8)), (3,))],
        [([0, 1, 2, 3], (0,)), ([4, 5], (4,)), ([6], (2,)), ([7], (1,))],
    ]


def test_power_of_two_sub_batches_wait_for_each_other() -> None:
    """Ranks 0 and 1 are free at 7 s; sequence 3 could end there at 12, but the barrier holds it until 10."""
    plan, pieces = planned("power-of-two", [14, 10, 10, 10, 2], 4, 10)
    assert pieces == [[([0, 1], (0,))], [([2], (1,))], [([3], (2,))], [([0, 1], (3,)), ([2, 3], (4,))]]
    assert plan.notes["predicted_seconds"] == 10 + 5
    packs = [[([0], (0, 2))], [([0], (1, 3, 4))], [([0], (5,))]]
    assert planned("power-of-two", [6, 5, 4, 3, 2, 1], 1, 10)[1] == packs
