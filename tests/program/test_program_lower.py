"""Lowering: every visible pair once, both sides of every round the same, whatever the plan."""

import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan, visible_pairs
from testing.order import check_order

from lengthwise.core.plan import Piece, Plan
from lengthwise.program import lower_microbatch, lower_plan


def covered_pairs(plan: Plan) -> Counter[tuple[int, int, int]]:
    """Count each (sequence, query, key) that any rank computes at any ring step, from tokens, not from borders."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for rank in range(plan.ranks):
        for program in lower_plan(plan, rank):
            own = [(s.sequence, t) for s in program.segments(rank) for t in range(s.start, s.stop)]
            for ring_step in range(program.ring_steps):
                held = {
                    index: [
                        (s.sequence, t)
                        for s in program.shard(index, (position - ring_step) % piece.degree)
                        for t in range(s.start, s.stop)
                    ]
                    for index, piece, position in program.pieces_of(rank)
                }
                for task in program.tasks(rank, ring_step):
                    queries = own[task.q_start : task.q_stop]
                    keys = held[task.piece][task.kv_start : task.kv_stop]
                    assert len(queries) == task.q_stop - task.q_start > 0
                    assert len(keys) == task.kv_stop - task.kv_start > 0
                    assert {i for i, _ in (*queries, *keys)} == {task.sequence}
                    assert not task.causal or queries == keys, "a causal block is square, on the diagonal"
                    for place, (sequence, query) in enumerate(queries):
                        for _, key in keys[: place + 1] if task.causal else keys:
                            pairs[sequence, query, key] += 1
    return pairs


def expected_pairs(plan: Plan) -> Counter[tuple[int, int, int]]:
    return Counter((i, *pair) for i, length in enumerate(plan.tokens) for pair in visible_pairs(length))


def check_rounds(plan: Plan) -> None:
    """Follow every shard through the rounds: it may be sent only by who holds it, and must end where it belongs."""
    for index in range(len(plan.microbatches)):
        program = lower_microbatch(plan, index)
        pieces = program.microbatch.pieces
        degree = max(piece.degree for piece in pieces)
        assert len(program.forward_rounds) == degree - 1
        assert len(program.backward_rounds) == (0 if degree == 1 else degree + 1)
        for rounds in (program.forward_rounds, program.backward_rounds):
            keys = {(p, j): j for p, piece in enumerate(pieces) for j in range(piece.degree)}
            grads: dict[tuple[int, int], int] = {}
            for ring_step, each in enumerate(rounds):
                new_keys, new_grads = dict(keys), dict(grads)
                for t in each.transfers:
                    ring = pieces[t.piece].ranks
                    source, target = ring.index(t.source), ring.index(t.target)
                    assert (source + 1) % len(ring) == target
                    assert t.source != t.target
                    assert t.tokens == program.shard_tokens(t.piece, t.owner) > 0
                    if t.content == "kv":
                        assert keys[t.piece, source] == t.owner
                        new_keys[t.piece, target] = t.owner
                    else:
                        assert ring_step >= 1
                        new_grads[t.piece, target] = t.owner
                # Gradients are of what was held in the ring step before: the sender held those keys then.
                for t in (t for t in each.transfers if t.content == "dkv"):
                    ring = pieces[t.piece].ranks
                    assert (ring.index(t.source) - (ring_step - 1)) % len(ring) == t.owner
                keys, grads = new_keys, new_grads
            if rounds is program.backward_rounds:
                for p, piece in enumerate(pieces):
                    for j in range(piece.degree if piece.degree > 1 else 0):
                        if program.shard_tokens(p, j):
                            assert grads[p, j] == j, "gradients end at owner"


@pytest.mark.parametrize("degree", range(1, 8))
def test_lowering_covers_each_visible_pair_once_at_any_degree(degree):
    for length in sorted({1, 2, 3, 5, 7, 11, max(1, degree - 1), 2 * degree - 1, 2 * degree, 2 * degree + 1, 23}):
        ring = Piece(ranks=tuple(random.Random(length).sample(range(degree), degree)), sequences=(0,))
        plan = make_plan(degree, [length], [ring])
        assert covered_pairs(plan) == expected_pairs(plan), f"length {length}"
        check_rounds(plan)


@given(choose=st.randoms(use_true_random=False), ranks=st.integers(1, 7), count=st.integers(1, 6))
def test_lowering_covers_each_visible_pair_once_under_any_plan(choose, ranks, count):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    assert covered_pairs(plan) == expected_pairs(plan)
    check_rounds(plan)
    check_order(plan, layers=2)


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
    check_rounds(plan)


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
    check_rounds(plan)
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


def test_lowering_has_no_even_length_rule_and_no_power_of_two_rule():
    """Section 7: power-of-two and even-length rules. Every degree and every length up to 2d + 1 lowers."""
    for degree in (3, 5, 6, 7):
        for length in range(1, 2 * degree + 2):
            plan = make_plan(degree, [length], [Piece(ranks=tuple(range(degree)), sequences=(0,))])
            assert covered_pairs(plan) == expected_pairs(plan)


def test_lowering_of_six_ranks_gives_right_groups():
    """Section 7: a rank count of 6 silently giving wrong groups. Rings of 6, 4 + 2, 3 + 3, 5 + 1 all cover."""
    for split in ((6,), (4, 2), (3, 3), (5, 1), (1, 2, 3)):
        pieces, first = [], 0
        for i, degree in enumerate(split):
            pieces.append(Piece(ranks=tuple(range(first, first + degree)), sequences=(i,)))
            first += degree
        for microbatches in ([pieces], pieces):
            plan = make_plan(6, [17 + i for i in range(len(split))], microbatches)
            assert covered_pairs(plan) == expected_pairs(plan)
            check_rounds(plan)
            check_order(plan)


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
