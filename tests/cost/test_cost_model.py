"""The cost formula, by hand and against itself."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError
from lengthwise.cost import Cost
from tiers import some

COEFFICIENTS = ("quadratic_seconds", "linear_seconds", "fixed_seconds", "ring_seconds", "hop_seconds")


def test_piece_seconds_on_one_rank_is_attention_and_linear_work() -> None:
    cost = Cost(quadratic_seconds=2.0, linear_seconds=3.0, fixed_seconds=100.0, ring_seconds=7.0, hop_seconds=5.0)
    assert cost.piece_seconds([10, 1], 1) == 2 * (100 + 1) + 3 * 11


def test_piece_seconds_in_a_ring_adds_hops_and_what_attention_does_not_hide() -> None:
    cost = Cost(quadratic_seconds=2.0, linear_seconds=3.0, ring_seconds=70.0, hop_seconds=5.0)
    attention, linear, transfers = 2 * 100 / 4, 3 * 10 / 4, 70 * 10 * 3 / 4
    assert cost.piece_seconds([10], 4) == attention + linear + (transfers - attention) + 5 * 3


def test_piece_seconds_hides_transfers_under_attention() -> None:
    cost = Cost(quadratic_seconds=2.0, ring_seconds=0.1)
    assert cost.piece_seconds([100], 4) == 2 * 100 * 100 / 4


@given(
    lengths=st.lists(st.integers(1, 10**7), min_size=1, max_size=20),
    degree=st.integers(1, 12288),
    values=st.lists(st.floats(0, 1e6), min_size=5, max_size=5),
)
def test_ring_piece_seconds_agrees_with_piece_seconds(lengths: list[int], degree: int, values: list[float]) -> None:
    cost = Cost(**dict(zip(COEFFICIENTS, [*values[:1], 1.0 + values[1], *values[2:]], strict=True)))
    many = cost.ring_piece_seconds(np.array(lengths), np.full(len(lengths), degree))
    assert many == pytest.approx([cost.piece_seconds([length], degree) for length in lengths], rel=1e-9)


def test_compute_seconds_is_the_piece_on_one_rank() -> None:
    cost = Cost(quadratic_seconds=0.5, linear_seconds=2.0, fixed_seconds=9.0)
    assert cost.compute_seconds(np.array([4, 6])).tolist() == [cost.piece_seconds([4], 1), cost.piece_seconds([6], 1)]


@pytest.mark.parametrize("name", some(COEFFICIENTS))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "1", None])
def test_cost_model_refuses_bad_coefficients_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Cost(**{"linear_seconds": 1.0, name: value})  # type: ignore[arg-type]


def test_cost_model_refuses_all_zero() -> None:
    with pytest.raises(ConfigError, match="at least one coefficient above 0"):
        Cost()
