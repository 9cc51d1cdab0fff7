"""Ratios of step seconds with their error: when a gain is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.simulator import MODEL_ERROR, gain_over, gain_text

SECONDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@given(ours=SECONDS, factor=st.floats(0.2, 5.0))
def test_a_constant_ratio_has_the_error_of_the_model_alone(ours, factor) -> None:
    gain = gain_over([factor * each for each in ours], ours)
    assert gain.ratio == pytest.approx(factor)
    assert (gain.low, gain.high) == pytest.approx((factor * (1 - MODEL_ERROR), factor * (1 + MODEL_ERROR)), rel=1e-6)
    assert gain.is_equal == (gain.low <= 1 <= gain.high)


def test_spread_over_batches_is_two_standard_errors() -> None:
    """Ratio 1.25; residuals -0.5 and 0.5 seconds about it, of mean 4: 2 x 0.7071 / 4 / sqrt(2)."""
    gain = gain_over([4.5, 5.5], [4.0, 4.0], model_error=0.0)
    assert (gain.ratio, gain.high - gain.ratio) == pytest.approx((1.25, 0.25))


def test_equal_is_written_as_equal() -> None:
    assert gain_text(gain_over([1.04], [1.0])) == "equal (1.04x)"
    assert gain_text(gain_over([1.10], [1.0])) == "1.10x"
    assert gain_text(gain_over([0.5], [1.0])) == "0.50x"
