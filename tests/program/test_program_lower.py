"""Lowering: where tokens lie, and nothing travels that no one needs; that every pair is seen once attention proves."""

import random

from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import check_order
from testing.plans import with_branches

from lengthwise.core.plan import Piece
from lengthwise.program import lower_microbatch, lower_plan

RANDOM = st.randoms(use_true_random=False)


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
    assert check_order(plan, windows=[8]) > 0


@given(choose=RANDOM, ranks=st.integers(1, 7), count=st.integers(1, 5), window=st.integers(1, 45))
def test_windowed_blocks_can_be_said_with_windows_that_count_from_the_last_key(choose, ranks, count, window):
    """Flash kernels align queries and keys at their ends, and see no further right than there are keys."""
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    plan = with_branches(choose, plan) if choose.random() < 0.5 else plan
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
