"""What `benchmarks/ring.py` says of what it timed."""

import pytest
import torch

from lengthwise.program import check_plan
from ring import RING, one_sequence, report, turn_of


def test_turn_is_that_of_the_later_rank() -> None:
    rows = torch.tensor([[2.0, 1.9, 0.1, 5.0], [2.1, 1.8, 0.3, 6.0], [2.0, 3.6, 0.0, 11.0]], dtype=torch.float64)
    turn = turn_of(rows)
    assert turn.ratio == pytest.approx(1.05)
    assert (turn.ring_cpu_seconds, turn.waited_seconds) == pytest.approx((3.7, 0.2))
    assert turn.ring_loss == turn.alone_loss == 11.0
    said = report([turn])
    assert said[-1] == "Median ratio **1.050** (aim 1.03: **missed**); of CPU seconds 1.028. Losses agree to 0e+00."


def test_ring_leaves_the_third_rank_out() -> None:
    plan = one_sequence(7, 3, RING, 4)
    check_plan(plan)
    assert plan.microbatches[0].ranks == (0, 1)
