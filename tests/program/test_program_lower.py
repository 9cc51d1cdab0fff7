"""Lowering: every visible pair once, both sides of every round the same, whatever the plan."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing import make_plan
from testing.order import check_order

from lengthwise.core.plan import Piece
from lengthwise.program import lower_microbatch, lower_plan
from program.following import covered_pairs, expected_pairs, follow_rounds


@pytest.mark.parametrize("degree", range(1, 8))
def test_lowering_covers_each_visible_pair_once_at_any_degree(degree):
    for length in sorted({1, 2, 3, 5, 7, 11, max(1, degree - 1), 2 * degree - 1, 2 * degree, 2 * degree + 1, 23}):
        ring = Piece(ranks=tuple(random.Random(length).sample(range(degree), degree)), sequences=(0,))
        plan = make_plan(degree, [length], [ring])
        assert covered_pairs(plan) == expected_pairs(plan), f"length {length}"
        follow_rounds(plan)


@given(
    length=st.integers(1, 30),
    shares=st.lists(st.one_of(st.integers(0, 5), st.floats(0, 1e6)), min_size=1, max_size=6).filter(any),
)
@example(length=7, shares=[0, 0, 1])
@example(length=1, shares=[1, 1, 1, 1, 1])
def test_lowering_covers_each_visible_pair_once_under_any_shares(length, shares):
    ring = Piece(ranks=tuple(range(len(shares))), sequences=(0,), shares=tuple(shares))
    plan = make_plan(len(shares), [length], [ring])
    assert covered_pairs(plan) == expected_pairs(plan)
    follow_rounds(plan)


def test_lowering_handles_a_rank_in_two_rings_of_one_microbatch():
    plan = make_plan(
        5,
        [13, 11, 4, 3],
        [
            [
                Piece(ranks=(0, 2, 1), sequences=(0,)),
                Piece(ranks=(2, 3, 4, 0, 1), sequences=(1,)),
                Piece(ranks=(2,), sequences=(2,)),
                Piece(ranks=(4, 2), sequences=(3,)),
            ]
        ],
    )
    assert covered_pairs(plan) == expected_pairs(plan)
    follow_rounds(plan)
    program = lower_microbatch(plan, 0)
    assert [piece for piece, *_ in program.pieces_of(2)] == [0, 1, 2, 3]
    assert max(sum(t.source == 2 for t in each.transfers) for each in program.forward_rounds) >= 2
    check_order(plan)


def test_ring_moves_the_same_tokens_as_the_rounds_of_the_formula():
    plan = make_plan(3, [30], [Piece(ranks=(0, 1, 2), sequences=(0,))])
    program = lower_microbatch(plan, 0)
    assert [sum(t.tokens for t in each.transfers) for each in program.forward_rounds] == [30, 30]
    assert [sum(t.tokens for t in each.transfers if t.content == "kv") for each in program.backward_rounds] == [
        30,
        30,
        0,
        0,
    ]
    assert [sum(t.tokens for t in each.transfers if t.content == "dkv") for each in program.backward_rounds] == [
        0,
        0,
        30,
        30,
    ], "what a position's own queries add to its keys' gradients never travels"


def test_rank_without_work_lowers_to_nothing():
    """Section 7: ranks with no work hanging the collective. Such a rank has the step's end and nothing before it."""
    plan = make_plan(4, [9], [Piece(ranks=(0, 2), sequences=(0,))])
    assert lower_plan(plan, 1) == ()
    assert lower_plan(plan, 3) == ()
    check_order(plan, layers=3)


def test_rank_without_tokens_still_passes_keys_on():
    plan = make_plan(3, [1], [Piece(ranks=(0, 1, 2), sequences=(0,))])
    program = lower_microbatch(plan, 0)
    tokens = [sum(s.num_tokens for s in program.segments(rank)) for rank in range(3)]
    assert sorted(tokens) == [0, 0, 1]
    holder = tokens.index(1)
    forward = [(t.source, t.target, t.tokens) for each in program.forward_rounds for t in each.transfers]
    assert forward == [(holder, (holder + 1) % 3, 1), ((holder + 1) % 3, (holder + 2) % 3, 1)]
    owner = [(t.source, t.target) for t in program.backward_rounds[-1].transfers]
    assert owner == [((holder + 2) % 3, holder)]


def test_segments_follow_the_cut_of_the_plan_file():
    """Position j holds chunks j and 2d-1-j; chunk k ends at floor(length x cumulative share)."""
    plan = make_plan(3, [13], [Piece(ranks=(2, 0, 1), sequences=(0,))])
    program = lower_microbatch(plan, 0)
    spans = {rank: [(s.start, s.stop) for s in program.segments(rank)] for rank in range(3)}
    assert spans == {2: [(0, 2), (10, 13)], 0: [(2, 4), (8, 10)], 1: [(4, 6), (6, 8)]}
    weighted = make_plan(2, [10], [Piece(ranks=(0, 1), sequences=(0,), shares=(3, 1))])
    program = lower_microbatch(weighted, 0)
    assert [[(s.start, s.stop) for s in program.segments(rank)] for rank in range(2)] == [
        [(0, 3), (6, 10)],
        [(3, 5), (5, 6)],
    ]
