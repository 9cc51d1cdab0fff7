"""The forecast of `verify` is arithmetic over shapes, lengths and a machine's speed: checked by hand."""

from dataclasses import replace

import pytest
from testing import make_plan

from lengthwise.core.plan import Piece
from lengthwise.core.shape import ModelShape
from lengthwise.report.forecast import ThreadRates, forecast_lines, forecast_verification

SHAPE = ModelShape(
    name="t", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, intermediate=32, vocab=64
)  # linear_params 2 (16 x 4 x 12 + 3 x 16 x 32) + 16 x 64 = 5632, in all 6656
SPEED = ThreadRates(
    cores=4,
    linear_flops_per_second=6.0 * 5632,  # a token a second
    attention_flops_per_second=7.0 * 2 * 4 * 4,  # a squared token a second
    copy_bytes_per_second=30 * 4 * 6656.0,  # all parameters of fp32 built in a second of one thread
    draw_per_second=6656.0,
    layer_seconds=0.5,
    process_bytes=1e9,
    memory_bytes=None,
)
LENGTHS = (10, 6, 4)
PLAN = make_plan(2, LENGTHS, [Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 2))])


def forecast(plan=PLAN, speed=SPEED, **changes):
    given = {"parameters": 6656, "precision": "fp32", "local_ranks": 2, **changes}
    return forecast_verification(SHAPE, plan, speed, **given)


def test_seconds_are_those_of_the_busiest_rank_and_of_one_process():
    found = forecast()
    # Two threads a rank. Rank 1: half of (10^2 + 10), then 6^2 + 4^2 + 10; a second of launches each.
    assert found.planned_seconds == pytest.approx((100 + 10) / 2 / 2 + 1 + (36 + 16 + 10) / 2 + 1)
    assert found.plain_seconds == pytest.approx((100 + 36 + 16 + 20) / 2 + 3)
    assert found.build_seconds == pytest.approx(2 * (1 / 2 + 1))
    assert found.total_seconds == found.planned_seconds + found.plain_seconds + found.build_seconds


def test_more_ranks_than_cores_wait_for_each_other():
    crowded = forecast(speed=replace(SPEED, cores=1))
    single = forecast(speed=replace(SPEED, cores=2))
    assert crowded.planned_seconds == pytest.approx(2 * single.planned_seconds)
    assert crowded.plain_seconds == single.plain_seconds


def test_bytes_count_parameters_and_the_fullest_rank():
    found = forecast()
    # Two layers and the hidden states, normed by the last norm; at the peak the logits, three times.
    token = 4 * (2 * (2 * 3 * 16 + 2 * 16 + 2 * 8 + 4 + 4 * 32) + 3 * 16) + 64 * 3 * 4
    model = 6656 * 4 * 2 + 2 * 6656 * 4 / 2
    assert found.planned_bytes == pytest.approx(1e9 + 2 * (60e6 + model + 10 * token))  # 6 + 4 packed tokens
    assert found.plain_bytes == pytest.approx(1e9 + 60e6 + model + 6656 * 4 + 6656 * 16 + 10 * token)
    assert found.peak_bytes == max(found.planned_bytes, found.plain_bytes)
    scores = 2 * 2 * 4 * 10**2 * 4
    assert forecast(eager=True).plain_bytes == pytest.approx(found.plain_bytes + scores)


def test_precision_recomputation_and_true_parameters_count():
    assert (
        forecast(precision="fp64").planned_bytes > forecast().planned_bytes > forecast(precision="bf16").planned_bytes
    )
    again = replace(PLAN, microbatches=tuple(replace(m, recompute="layer") for m in PLAN.microbatches))
    assert forecast(again).planned_bytes < forecast().planned_bytes
    assert forecast(again).planned_seconds > forecast().planned_seconds
    twice = forecast(parameters=2 * 6656)
    assert twice.plain_seconds - forecast().plain_seconds == pytest.approx(20 / 2)
    assert twice.build_seconds == pytest.approx(2 * forecast().build_seconds)


def test_lines_warn_only_where_memory_is_short():
    found = forecast()
    assert len(forecast_lines(found, None)) == len(forecast_lines(found, found.peak_bytes)) == 2
    told = forecast_lines(found, found.peak_bytes - 1)
    assert len(told) == 3
    assert told[2].startswith("warning: this machine has 1.12GB of memory")
    assert "fewer --ranks" in told[2]
