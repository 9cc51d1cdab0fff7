"""Lowering: every visible pair once under any plan and window, and nothing travels that no one needs."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import check_order
from testing.plans import with_branches

from lengthwise.core.plan import Piece
from lengthwise.program import lower_microbatch, lower_plan
from program.following import covered_pairs, expected_pairs, follow_rounds

RANDOM = st.randoms(use_true_random=False)


def drawn(choose, ranks, count, *, num_heads=1):
    """Draw a plan; in half of them sequences continue others."""
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=num_heads)
    return with_branches(choose, plan) if choose.random() < 0.5 else plan


@given(
    choose=RANDOM,
    ranks=st.integers(1, 8),
    count=st.integers(1, 5),
    window=st.none() | st.integers(1, 4) | st.integers(1, 45),
    heads=st.sampled_from([1, 840]),
)
def test_lowering_covers_each_visible_pair_once_under_any_plan_and_window(choose, ranks, count, window, heads):
    """Any degree, order, shares, split heads and prefixes, ranks in several rings of a microbatch, few tokens."""
    plan = drawn(choose, ranks, count, num_heads=heads)
    assert covered_pairs(plan, window) == expected_pairs(plan, window)
    if heads == 1:
        follow_rounds(plan, window)
    check_order(plan, windows=[window, None])


@given(length=st.integers(1, 30), shares=st.lists(st.integers(0, 5) | st.floats(0, 1e6), min_size=1, max_size=6))
@example(length=7, shares=[0, 0, 1])
def test_lowering_covers_each_visible_pair_once_under_any_shares(length, shares):
    ring = Piece(ranks=tuple(range(len(shares))), sequences=(0,), shares=tuple(shares) if any(shares) else None)
    plan = make_plan(len(shares), [length], [ring])
    assert covered_pairs(plan) == expected_pairs(plan)
    follow_rounds(plan)


@pytest.mark.parametrize(("length", "window"), [(270, 129), (3, 2)])
def test_windowed_lowering_tiles_long_documents_and_masks_the_first_token_beyond(length, window):
    plan = make_plan(1, [length], [Piece(ranks=(0,), sequences=(0,))])
    assert covered_pairs(plan, window) == expected_pairs(plan, window)


@pytest.mark.parametrize(("tokens", "window"), [((80, 3, 2, 1), 2), ((17, 12, 9, 5), 14)])
def test_windows_reach_from_sequence_to_sequence(tokens, window):
    """Two sequences continue one that continues another, in a ring; the first have fewer tokens than it has chunks."""
    ring = Piece(ranks=(0, 2, 3, 1), sequences=(0, 1, 2, 3))
    plan = replace(make_plan(4, tokens, [ring]), parents=(None, 0, 1, 1))
    assert covered_pairs(plan, window) == expected_pairs(plan, window)
    follow_rounds(plan, window)


def test_windowed_ring_talks_to_its_neighbours_only_when_the_window_is_short():
    degree = 8
    ring = Piece(ranks=tuple(random.Random(1).sample(range(degree), degree)), sequences=(0,))
    plan = make_plan(degree, [64 * degree], [ring])
    whole, narrow = lower_microbatch(plan, 0), lower_microbatch(plan, 0).with_window(8)
    assert len(whole.forward_rounds) == degree - 1
    assert len(narrow.forward_rounds) == 1, "chunks are 32 tokens, a window of 8 reaches one chunk back"
    sent = sum(t.tokens for each in narrow.forward_rounds for t in each.transfers)
    assert sent <= 2 * 64 * degree
    assert len(narrow.backward_rounds) <= 3
    follow_rounds(plan, 8)


@given(choose=RANDOM, ranks=st.integers(1, 7), count=st.integers(1, 5), window=st.integers(1, 45))
def test_windowed_blocks_can_be_said_with_windows_that_count_from_the_last_key(choose, ranks, count, window):
    """Flash kernels align queries and keys at their ends, and see no further right than there are keys."""
    plan = drawn(choose, ranks, count)
    for rank in range(ranks):
        for whole in lower_plan(plan, rank):
            program = whole.with_window(window)
            for task in (task for ring_step in range(program.ring_steps) for task in program.tasks(rank, ring_step)):
                queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
                if task.causal:
                    assert keys - queries == task.distance
                elif task.window is not None:
                    assert queries < keys
                    assert keys - queries - task.distance + task.window - 1 >= 0, "the last query sees the last key"


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
