"""Tokens held: the vector form against the cutting rule, its bound, what rounding allows, what offload keeps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.cut import local_tokens
from lengthwise.core.held import fullest_tokens, held_at_most, held_by_rank, held_tokens, kept_ratio
from lengthwise.core.plan import Microbatch, Piece, Plan


@given(
    lengths=st.lists(st.integers(1, 10**6) | st.integers(1, 8), min_size=1, max_size=4),
    degree=st.integers(1, 20),
    weights=st.none() | st.lists(st.integers(1, 9), min_size=20, max_size=20),
)
def test_held_tokens_agrees_with_the_cutting_rule(lengths: list[int], degree: int, weights: list[int] | None) -> None:
    shares = None if weights is None else tuple(float(weight) for weight in weights[:degree])
    expected = [local_tokens(lengths, degree, j, shares) for j in range(degree)]
    assert held_tokens(lengths, degree, shares).tolist() == expected
    assert sum(expected) == sum(lengths)


def test_held_at_most_is_two_chunks_rounded_up_and_exact_on_one_rank() -> None:
    assert [held_at_most(9, degree) for degree in (1, 2, 4, 8)] == [9, 6, 4, 2]
    assert held_at_most(np.array([1, 16, 17]), 4).tolist() == [2, 4, 6]


def test_held_by_rank_adds_pieces_and_allows_a_token_a_cut_sequence() -> None:
    ring, pack = Piece(ranks=(0, 2), sequences=(0, 1)), Piece(ranks=(2,), sequences=(2, 3))
    microbatch = Microbatch(pieces=(ring, pack))
    plan = Plan(ranks=3, layers=1, capacity=9, tokens=(8, 4, 1, 2), microbatches=(microbatch,))
    assert held_by_rank(plan, microbatch) == ({0: 6, 2: 9}, {0: 2, 2: 2})
    assert fullest_tokens(plan, microbatch) == 9


def test_kept_ratio_keeps_the_first_and_the_last_layer() -> None:
    assert [kept_ratio(offload, 8) for offload in (0.0, 0.5, 1.0)] == [1.0, 0.625, 0.25]
    assert kept_ratio(1.0, 2) == kept_ratio(1.0, 1) == 1.0
