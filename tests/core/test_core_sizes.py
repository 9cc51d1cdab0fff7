"""Numbers of tokens as people write them; tokens held, by the cutting rule, rounding and what offload keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.cut import local_tokens
from lengthwise.core.errors import ConfigError
from lengthwise.core.held import fullest_tokens, held_at_most, held_by_rank, held_tokens, kept_ratio
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import parse_tokens, read_whole, whole_number, written_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1", 1), ("8192", 8192), ("8K", 8192), ("256k", 262144), ("2M", 2097152), ("1.5M", 1572864), (" 1G ", 2**30)],
)
def test_sizes_are_binary(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--context") == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1.3K", "2MB", "1e6", "9999999999999G", "1" * 400])
def test_sizes_that_are_none_are_refused_by_place(text: str) -> None:
    with pytest.raises(ConfigError, match="--context"):
        parse_tokens(text, "--context")


def test_whole_numbers_of_numpy_become_ints() -> None:
    for value in (7, np.int64(7), np.uint8(7)):
        assert (whole_number(value), type(whole_number(value))) == (7, int)
    cluster = Cluster(ranks=np.int64(3), capacity_tokens=np.int32(5))
    assert cluster == Cluster(ranks=3, capacity_tokens=5)
    assert type(cluster.ranks) is int


@pytest.mark.parametrize("value", [True, np.True_, 7.0, np.float64(7), "7", None, [7]])
def test_what_is_no_whole_number_is_none(value: object) -> None:
    assert whole_number(value) is None
    with pytest.raises(ConfigError, match="ranks: expected a whole number of at least 1"):
        read_whole("ranks", value)


def test_whole_numbers_out_of_range_are_told_with_the_range() -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 2\^53"):
        read_whole("ranks", 2**53 + 1)
    with pytest.raises(ConfigError, match="from 0 to 9; got -1"):
        read_whole("seed", -1, least=0, most=9)
    assert read_whole("seed", 0, least=0, most=9) == 0


@pytest.mark.parametrize(("tokens", "text"), [(8192, "8K"), (2**21, "2M"), (2**30, "1G"), (1536, "1536"), (1, "1")])
def test_numbers_of_tokens_are_written_as_they_are_read(tokens: int, text: str) -> None:
    assert written_tokens(tokens) == text
    assert parse_tokens(text, "--context") == tokens


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
