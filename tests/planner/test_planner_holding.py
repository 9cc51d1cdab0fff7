"""Tokens held by each position: the vector form against the cutting rule."""

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.cut import local_tokens
from lengthwise.core.held import held_tokens


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


@given(length=st.integers(1, 10**7), degree=st.integers(1, 200))
def test_held_tokens_exceed_the_share_by_at_most_one(length: int, degree: int) -> None:
    assert held_tokens([length], degree).max() <= -(-length // degree) + 1


def test_held_tokens_of_enormous_lengths_do_not_overflow() -> None:
    assert held_tokens([2**62], 4).tolist() == [2**60] * 4
