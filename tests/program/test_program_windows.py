"""Sliding windows in rings: the same pairs as one process sees, and nothing travels that no one needs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import check_order

from lengthwise.core.plan import Piece
from lengthwise.program import lower_microbatch, lower_plan
from program.following import covered_pairs, expected_pairs, follow_rounds


@given(
    choose=st.randoms(use_true_random=False),
    ranks=st.integers(1, 7),
    count=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 45)),
)
def test_windowed_lowering_covers_each_visible_pair_once_under_any_plan(choose, ranks, count, window):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    assert covered_pairs(plan, window) == expected_pairs(plan, window)
    follow_rounds(plan, window)
    check_order(plan, windows=[window, None])


@pytest.mark.parametrize("window", [1, 100, 128, 129, 200, 500, 511, 512])
def test_windowed_lowering_tiles_long_documents(window):
    plan = make_plan(2, [512, 300], [Piece(ranks=(0,), sequences=(0,)), Piece(ranks=(1, 0), sequences=(1,))])
    assert covered_pairs(plan, window) == expected_pairs(plan, window)


@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_short_windows_reach_the_chunk_before(degree):
    """A window of two or three tokens still takes keys over the border of a chunk."""
    for length in (7, 20, 33):
        plan = make_plan(degree, [length], [Piece(ranks=tuple(range(degree)), sequences=(0,))])
        for window in range(1, 5):
            assert covered_pairs(plan, window) == expected_pairs(plan, window)
            follow_rounds(plan, window)


@pytest.mark.parametrize("degree", range(2, 9))
def test_windowed_ring_talks_to_its_neighbours_only_when_the_window_is_short(degree):
    ring = Piece(ranks=tuple(random.Random(1).sample(range(degree), degree)), sequences=(0,))
    plan = make_plan(degree, [64 * degree], [ring])
    whole, narrow = lower_microbatch(plan, 0), lower_microbatch(plan, 0).with_window(8)
    assert len(whole.forward_rounds) == degree - 1
    assert len(narrow.forward_rounds) == 1, "chunks are 32 tokens, a window of 8 reaches one chunk back"
    sent = sum(t.tokens for each in narrow.forward_rounds for t in each.transfers)
    assert sent <= 2 * 64 * degree
    assert len(narrow.backward_rounds) == 3 if degree == 2 else len(narrow.backward_rounds) <= 3
    follow_rounds(plan, 8)


def test_windowed_work_follows_the_window():
    plan = make_plan(3, [6000], [Piece(ranks=(0, 2, 1), sequences=(0,))])

    def work(window):
        program = lower_microbatch(plan, 0).with_window(window)
        return sum(
            (task.q_stop - task.q_start) * (task.kv_stop - task.kv_start)
            for rank in range(3)
            for ring_step in range(program.ring_steps)
            for task in program.tasks(rank, ring_step)
        )

    assert work(250) <= 2.2 * 250 * 6000
    assert work(None) >= 6000 * 6000 / 2


def test_window_as_long_as_the_longest_sequence_changes_nothing():
    plan = make_plan(3, [40, 9], [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1,))])
    program = lower_microbatch(plan, 0)
    assert program.with_window(40) == program
    assert program.with_window(39) != program


@given(
    choose=st.randoms(use_true_random=False),
    ranks=st.integers(1, 7),
    count=st.integers(1, 5),
    window=st.integers(1, 45),
)
def test_windowed_blocks_can_be_said_with_windows_that_count_from_the_last_key(choose, ranks, count, window):
    """Flash kernels align queries and keys at their ends, and see no further right than there are keys."""
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
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
