"""Trees of sequences that continue others, priced by hand."""

import numpy as np
import pytest

from lengthwise.cost import Cost, Tree, lengths_of


def test_a_tree_runs_at_the_speed_of_its_own_blocks() -> None:
    """A prompt of 1,000 tokens, which two completions of 500 continue.

    They see 3.5 million squared tokens: 1 and 2 x 0.25 million of their own, in blocks of 1,000 and 500, and 2 x 1
    million of the prompt, in one of 1,000.
    """
    cost = Cost(quadratic_seconds=1e-6, block_efficiency=((250, 0.25), (500, 0.5), (1000, 1.0)))
    (length,), priced = lengths_of([Tree((0, 1, 2), ((0, 1000), (1000, 1500), (1000, 1500)))], cost)
    assert length == 2000
    own = (1 * 1000 + 0.5 * 500) / 1.5  # tokens of a block, in the mean over squared tokens
    for positions in (1, 2):
        seconds = 1.5 / (own / positions / 1000) + 2 / (1 / positions)
        assert priced.attention_seconds(np.array([2000.0]), positions) == pytest.approx([seconds])


def test_a_long_completion_keeps_the_speed_of_its_own_block() -> None:
    """Beside a short prompt and short completions: cuDNN runs blocks from 32K on much faster."""
    cost = Cost(quadratic_seconds=1e-6, block_efficiency=((1000, 0.5), (32000, 0.6), (33000, 1.0)))
    spans = ((0, 1000), (1000, 65000), (1000, 5000), (1000, 5000))
    (length,), priced = lengths_of([Tree((0, 1, 2, 3), spans)], cost)
    whole = cost.attention_seconds(np.array([65000.0, 5000.0, 5000.0]), 1).sum()
    assert 1 < priced.attention_seconds(np.array([float(length)]), 1)[0] / whole < 1.05
    cost, length = Cost(quadratic_seconds=1.0), 2000
    priced = lengths_of([Tree((0, 1, 2), ((0, 1000), (1000, 1500), (1000, 1500)))], cost)[1]
    assert priced.seen_pairs(np.array([2000.0])) == pytest.approx([3.5e6])
    assert priced.attention_seconds(np.array([1999.0]), 1) == cost.attention_seconds(np.array([1999.0]), 1)


def test_a_prefix_in_a_prefix_is_a_block_of_its_own() -> None:
    """1,000 tokens, which 600 continue, which two answers of 200 continue; then one of 200 that skips the 600.

    A smaller tree is beside it.
    """
    cost = Cost(quadratic_seconds=1e-6, block_efficiency=((100, 0.1), (1000, 1.0)))
    spans = ((0, 1000), (1000, 1600), (1600, 1800), (1600, 1800), (1000, 1200))
    trees = [Tree((0, 1, 2, 3, 4), spans), Tree((5, 6), ((0, 1000), (1000, 1600)))]
    lengths, priced = lengths_of(trees, cost)
    assert lengths == (2200, 1600)
    own = {1000: 1000**2, 600: 600**2, 200: 3 * 200**2}
    between = {1000: 2 * 1000 * (600 + 200), 800: 2 * 1600 * 2 * 200}  # 1,600 tokens in two blocks
    means = [sum(block * each for block, each in of.items()) / sum(of.values()) for of in (own, between)]
    seconds = sum(sum(of.values()) * 1e-6 / (mean / 1000) for of, mean in zip((own, between), means, strict=True))
    assert priced.attention_seconds(np.array([2200.0]), 1) == pytest.approx([seconds])
