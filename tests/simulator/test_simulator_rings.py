"""Rings that run side by side: each comes out as it would alone, but for rounding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.program import ring_order
from lengthwise.simulator import microbatch_clocks
from lengthwise.simulator.rounds import ring_clocks

COST = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
LENGTH = st.one_of(st.integers(1, 40), st.integers(1, 300_000))
FIELDS = ("forward", "total", "compute", "copied", "held_tokens")


@given(
    lengths=st.lists(st.lists(LENGTH, min_size=1, max_size=3), min_size=1, max_size=5),
    groups=st.integers(1, 7),
    heads=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "layer", "all_but_attention"]),
    offload=st.sampled_from([0.0, 0.7]),
)
def test_rings_side_by_side_come_out_as_alone(lengths, groups, heads, recompute, offload) -> None:
    tokens = [length for each in lengths for length in each]
    starts = np.cumsum([0, *map(len, lengths)]).tolist()
    microbatches = [
        Microbatch(
            pieces=(
                Piece(
                    ranks=ring_order(3 * number, groups * heads, heads),
                    sequences=tuple(range(start, start + len(each))),
                    heads=heads,
                ),
            ),
            recompute=recompute,
            offload=offload,
        )
        for number, (start, each) in enumerate(zip(starts, lengths, strict=False))
    ]
    together = ring_clocks(microbatches, tokens, COST)
    assert [clocks.ranks for clocks in together] == [microbatch.ranks for microbatch in microbatches]
    for microbatch, clocks in zip(microbatches, together, strict=True):
        alone = microbatch_clocks(microbatch, tokens, COST)
        for name in FIELDS:
            assert getattr(clocks, name).tolist() == pytest.approx(getattr(alone, name).tolist(), rel=1e-13, abs=0)
