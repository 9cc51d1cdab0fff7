"""Work follows the sliding window: counted pair by pair, for one sequence and for many."""

import numpy as np
import pytest

from lengthwise.core.errors import ConfigError
from lengthwise.cost import Cost, analytic_cost, named_hardware, shape_from_config

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("window", [1, 3, 7, 8, 100])
def test_windowed_layers_count_the_pairs_they_see(window):
    cost = Cost(quadratic_seconds=1.0, windows=((window, 0.25),))
    for length in (1, 2, 7, 8, 50):
        seen = sum(min(query + 1, window) for query in range(length))
        everything = length * (length + 1) / 2
        # s^2 stands for twice the pairs, the diagonal counted half; so does s^2 - (s - w)^2 = 2 s w - w^2.
        windowed = 2 * seen - min(length, window)
        expected = 0.75 * (2 * everything - length) + 0.25 * windowed
        assert cost.piece_seconds([length], 1) == pytest.approx(expected)
        assert cost.compute_seconds(np.array([length]))[0] == pytest.approx(expected)
        assert cost.ring_piece_seconds(np.array([length]), np.array([1]))[0] == pytest.approx(expected)


def test_windows_longer_than_the_sequence_change_nothing():
    plain, windowed = (Cost(quadratic_seconds=2.0, linear_seconds=3.0, windows=w) for w in ((), ((64, 1.0),)))
    assert plain.piece_seconds([64, 5], 3) == windowed.piece_seconds([64, 5], 3)
    assert windowed.piece_seconds([65], 1) < plain.piece_seconds([65], 1)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, ()),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 8}, ((8, 6),)),
        ({"sliding_window": 8, "use_sliding_window": False}, ()),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, ((8, 5),)),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 6}, ()),
        ({"sliding_window": 8, "sliding_window_pattern": 6}, ((8, 5),)),
    ],
)
def test_shape_reads_windows_from_a_config(config, windows):
    shape = shape_from_config({**SIZES, **config})
    assert shape.windows == windows
    cost = analytic_cost(shape, named_hardware("h100"))
    assert cost.windows == tuple((window, layers / 6) for window, layers in windows)


@pytest.mark.parametrize("windows", [((0, 0.5),), ((4, -0.1),), ((4, 0.7), (8, 0.7))])
def test_windows_that_make_no_sense_are_refused(windows):
    with pytest.raises(ConfigError, match="windows"):
        Cost(quadratic_seconds=1.0, windows=windows)
