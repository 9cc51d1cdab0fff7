"""Sliding windows in rings: the same pairs as one process sees, and nothing travels that no one needs."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan, visible_pairs
from testing.order import check_order

from lengthwise.core.plan import Piece, Plan
from lengthwise.program import lower_microbatch, lower_plan


def covered_pairs(plan: Plan, window: int | None) -> Counter[tuple[int, int, int]]:
    """Count each (sequence, query, key) that any task of any rank sees, from the tokens its offsets point to."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for rank in range(plan.ranks):
        for whole in lower_plan(plan, rank):
            program = whole.with_window(window)
            own = [(s.sequence, t) for s in program.segments(rank) for t in range(s.start, s.stop)]
            first_blocks: Counter[int] = Counter()
            for ring_step in range(program.ring_steps):
                for task in program.tasks(rank, ring_step):
                    held = [
                        (s.sequence, t) for s in program.shard(task.piece, task.owner) for t in range(s.start, s.stop)
                    ]
                    queries, keys = own[task.q_start : task.q_stop], held[task.kv_start : task.kv_stop]
                    assert queries
                    assert keys
                    first_blocks.update(range(task.q_start, task.q_stop) if task.causal else ())
                    for row, (sequence, query) in enumerate(queries):
                        seen = 0
                        for column, (other, key) in enumerate(keys):
                            assert other == sequence == task.sequence
                            hidden = task.causal and column > task.distance + row
                            far = task.window is not None and task.distance + row - column >= task.window
                            if task.causal or task.window is not None:
                                gap = task.distance + row - column
                                assert task.window is None or gap == query - key, "distance must be that of the tokens"
                            if not hidden and not far:
                                pairs[sequence, query, key] += 1
                                seen += 1
                        assert seen, "a row without a visible key would weigh as if it had seen something"
            assert first_blocks == Counter(range(len(own))), "every query is in exactly one diagonal block"
    return pairs


def expected_pairs(plan: Plan, window: int | None) -> Counter[tuple[int, int, int]]:
    return Counter(
        (i, query, key)
        for i, length in enumerate(plan.tokens)
        for query, key in visible_pairs(length)
        if window is None or query - key < window
    )


def follow_rounds(plan: Plan, window: int | None) -> None:
    """Run the rounds on sets: keys are sent only by who holds them, and each owner gets every share exactly once."""
    for index in range(len(plan.microbatches)):
        program = lower_microbatch(plan, index).with_window(window)
        pieces = program.microbatch.pieces
        computed = {}  # (piece, position, owner) -> ring step of its blocks
        for p, piece in enumerate(pieces):
            for j, rank in enumerate(piece.ranks):
                for ring_step in range(program.ring_steps):
                    for task in program.tasks(rank, ring_step):
                        if task.piece == p:
                            computed[p, j, task.owner] = ring_step
        for rounds in (program.forward_rounds, program.backward_rounds):
            held = {(p, j): {j} for p, piece in enumerate(pieces) for j in range(piece.degree)}
            shares: dict[tuple[int, int, int], Counter[int]] = {}
            for ring_step in range(max(len(rounds), program.ring_steps)):
                for (p, j, owner), when in computed.items():
                    if when == ring_step:
                        assert owner in held[p, j], f"ring step {ring_step}: position {j} lacks the keys of {owner}"
                arrivals = []
                for t in rounds[ring_step].transfers if ring_step < len(rounds) else ():
                    ring = pieces[t.piece].ranks
                    source, target = ring.index(t.source), ring.index(t.target)
                    assert t.tokens == program.shard_tokens(t.piece, t.owner) > 0
                    assert (target - source) % len(ring) in (1, len(ring) - 1), "only neighbours of the ring talk"
                    if t.content == "kv":
                        assert t.owner in held[t.piece, source]
                        arrivals.append(((t.piece, target), t.owner))
                    else:
                        mine = shares.pop((t.piece, source, t.owner), Counter())
                        arrivals.append(((t.piece, target, t.owner), mine))
                if rounds is program.backward_rounds:
                    for (p, j, owner), when in computed.items():
                        if when == ring_step:
                            shares.setdefault((p, j, owner), Counter())[j] += 1
                for key, what in arrivals:
                    if isinstance(what, Counter):
                        shares.setdefault(key, Counter()).update(what)
                    else:
                        held[key].add(what)
            if rounds is program.backward_rounds:
                expected: dict[tuple[int, int, int], Counter[int]] = {}
                for p, j, owner in computed:
                    expected.setdefault((p, owner, owner), Counter())[j] += 1
                assert {key: share for key, share in shares.items() if share} == expected


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
