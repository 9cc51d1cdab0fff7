"""The price of one more forward."""

from dataclasses import replace

import pytest
from testing import make_plan

from lengthwise.core.plan import Piece
from lengthwise.cost import Cost, analytic_cost, named_hardware, named_shape
from lengthwise.planner import score

COST = analytic_cost(named_shape("llama-7b"), named_hardware("h100"))


def test_recompute_prices_one_more_forward_and_attention_only_where_it_is_run_again():
    layer, kept = COST.recomputing("layer"), COST.recomputing("all_but_attention")
    assert layer.linear_seconds == kept.linear_seconds == pytest.approx(COST.linear_seconds * 8 / 6)  # FLOPs
    assert layer.quadratic_seconds == pytest.approx(COST.quadratic_seconds * 9 / 7)
    assert layer.ring_seconds == pytest.approx(COST.ring_seconds * (3 * 2 + 4) / (2 * 2 + 4))  # bytes a value
    assert layer.hop_seconds == pytest.approx(COST.hop_seconds * 3 / 2)
    assert (kept.quadratic_seconds, kept.ring_seconds, kept.hop_seconds) == (
        COST.quadratic_seconds,
        COST.ring_seconds,
        COST.hop_seconds,
    )
    assert (kept.windows, kept.version) == (COST.windows, COST.version)


def test_score_prices_each_microbatch_by_its_own_kind():
    cost = Cost(quadratic_seconds=7.0, linear_seconds=3.0, fixed_seconds=3.0)
    plan = make_plan(1, [2, 2, 2], [Piece(ranks=(0,), sequences=(i,)) for i in range(3)])
    kinds = ("none", "layer", "all_but_attention")
    mixed = replace(
        plan, microbatches=tuple(replace(m, recompute=k) for m, k in zip(plan.microbatches, kinds, strict=True))
    )
    assert score(plan, cost).makespan_seconds == pytest.approx(3 * (28 + 6 + 3))
    assert score(mixed, cost).makespan_seconds == pytest.approx((28 + 6 + 3) + (36 + 8 + 4) + (28 + 8 + 4))
