"""One rank's ring steps: lowered without the rounds of the others, in as many transfers as it makes."""

import pytest
from testing import make_plan

from lengthwise.attention.ring_steps import ring_steps_of
from lengthwise.core.plan import Piece
from lengthwise.program import lower_microbatch, ring_order


@pytest.mark.parametrize(("degree", "heads"), [(64, 1), (256, 1), (256, 4)])
@pytest.mark.parametrize("window", [None, 900])
def test_a_rank_lowers_its_own_part_alone(degree, heads, window):
    piece = Piece(ranks=ring_order(0, degree, heads), sequences=(0,), heads=heads)
    program = lower_microbatch(make_plan(degree, [64 * degree], [piece]), 0).with_window(window)
    forward, backward = ring_steps_of(program, 5, packs_on=None)
    assert not {"forward_rounds", "backward_rounds"} & vars(program).keys()
    positions = degree // heads
    if window is None:
        assert len(forward) == positions
        assert sum(len(each.sends) for each in forward) == positions - 1
        assert sum(len(each.sends) for each in backward) == 2 * (positions - 1)
    assert sum(len(each.receives) for each in backward) <= 4 * positions
    assert sum(len(each.tasks) for each in forward) <= 4 * positions
    used = [shard for each in backward for shard in each.last_used]
    assert len(used) == len(set(used))
