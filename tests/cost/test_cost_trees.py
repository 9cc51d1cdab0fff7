"""Trees of sequences that continue others, priced by hand."""

import numpy as np
import pytest

from lengthwise.cost import Cost, Tree, lengths_of


def test_a_tree_runs_at_the_speed_of_its_own_blocks() -> None:
    """A prompt of 1,000 tokens, which two completions of 500 continue.

    They see 3.5 million squared tokens: 1 and 2 x 0.25 million in blocks of 1,000 and 500, and 2 x 1 million of the
    prompt in one of 1,000. As long a block as all of these would run at twice the speed.
    """
    cost = Cost(quadratic_seconds=1e-6, block_efficiency=((500, 0.5), (1000, 1.0)))
    (length,), priced = lengths_of([Tree((0, 1, 2), ((0, 1000), (1000, 1500), (1000, 1500)))], cost)
    assert length == 2000
    blocks = 3.5e6 / (1000 + 2 * 500 + 2 * 1000)
    for positions, speed in ((1, blocks / 1000), (2, 0.5 * (blocks / 2) / 500)):
        assert priced.attention_seconds(np.array([2000.0]), positions) == pytest.approx(3.5 / speed)
    assert priced.attention_seconds(np.array([1999.0]), 1) == cost.attention_seconds(np.array([1999.0]), 1)
