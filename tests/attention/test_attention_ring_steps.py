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


@pytest.mark.parametrize("window", [None, 1000], ids=["whole", "a window that reaches over everything"])
def test_a_rank_computes_one_block_a_ring_step_where_one_will_do(window):
    """Both chunks of a later position lie side by side: kernels of GPUs are faster on one block than on two."""
    piece = Piece(ranks=ring_order(0, 5), sequences=(0, 1))
    program = lower_microbatch(make_plan(5, [500, 70], [piece]), 0).with_window(window)
    for rank in range(5):
        for ring_step in range(1, 5):
            tasks = program.tasks(rank, ring_step)
            assert [task.sequence for task in tasks] == [0, 1]
            assert not any(task.causal for task in tasks)
