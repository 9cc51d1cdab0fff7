"""ByteScale's Algorithm 1: the fewest ranks, dealt in order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.bytescale_naive import deal_in_rounds

COST = Cost(linear_seconds=1.0)


def test_bytescale_naive_deals_long_ones_in_order_and_fills_rounds_with_packs() -> None:
    plan = plan_step(
        [150, 60, 250, 40, 30, 70], Cluster(ranks=4, capacity_tokens=100), COST, PlanOptions(planner="bytescale-naive")
    )
    pieces = [(microbatch.pieces[0].ranks, microbatch.pieces[0].sequences) for microbatch in plan.microbatches]
    assert pieces == [((0, 1), (0,)), ((2,), (5, 4)), ((3,), (1, 3)), ((0, 2, 1), (2,))]
    assert plan.notes["predicted_seconds"] == pytest.approx(100 + 250 / 3)


def test_bytescale_naive_is_blind_to_work() -> None:
    tokens = [100, 10, 100, 10]  # no two fit together, so each pack is one sequence
    dear = Cost(quadratic_seconds=1.0)
    plans = [
        plan_step(tokens, Cluster(ranks=2, capacity_tokens=101), c, PlanOptions(planner="bytescale-naive"))
        for c in (COST, dear)
    ]
    assert plans[0].microbatches == plans[1].microbatches


def test_deal_in_rounds_takes_the_first_round_with_room() -> None:
    assert deal_in_rounds([3, 2, 1, 2, 1], 4) == [(0, 0), (1, 0), (0, 3), (1, 2), (2, 0)]


@given(data=st.data(), ranks=st.integers(1, 13))
def test_deal_in_rounds_gives_no_slot_twice(data: st.DataObject, ranks: int) -> None:
    degrees = data.draw(st.lists(st.integers(1, ranks), min_size=1, max_size=40))
    slots = deal_in_rounds(degrees, ranks)
    taken = [
        (number, rank)
        for (number, first), degree in zip(slots, degrees, strict=True)
        for rank in range(first, first + degree)
    ]
    assert len(taken) == len(set(taken))
    assert all(rank < ranks for _, rank in taken)


@given(
    tokens=st.lists(st.integers(1, 900), min_size=1, max_size=40),
    ranks=st.sampled_from([9, 11, 12]),
)
def test_bytescale_naive_uses_the_fewest_ranks_and_nearly_full_packs(tokens: list[int], ranks: int) -> None:
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), COST, PlanOptions(planner="bytescale-naive"))
    packs: list[int] = []
    for microbatch in plan.microbatches:
        (piece,) = microbatch.pieces
        held = sum(tokens[i] for i in piece.sequences)
        assert piece.degree == -(-held // 100)
        if piece.degree == 1:
            packs.append(held)
    assert all(a + b > 100 for a, b in pairwise(packs))  # or they would be one pack
