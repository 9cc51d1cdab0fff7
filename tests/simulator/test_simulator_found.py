"""What a planner is found to take: figures of steps, traces, and gains with their error, by hand."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.shape import Cluster, LayerCut
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, step_flops, step_memory
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.simulator import (
    MODEL_ERROR,
    Branches,
    Setting,
    chosen_ranks,
    chrome_trace,
    gain_over,
    run_batches,
    simulate_plan,
)
from lengthwise.simulator.found import ideal_seconds, needed_bytes

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
SETTING = Setting(
    memory=step_memory(SHAPE, HARDWARE, 16),
    hardware=HARDWARE,
    cost=all_terms_cost(SHAPE, HARDWARE),
    capacities={"none": 8192},
    context_tokens=120_000,
    options=PlanOptions(layers=32),
)
CLUSTER = Cluster(ranks=16, capacity_tokens=8192)


def test_study_of_uniform_sequences() -> None:
    result = run_batches("lengthwise", [[8192] * 32], SETTING)
    plan = plan_step([8192] * 32, CLUSTER, SETTING.cost, PlanOptions(layers=32))
    assert result.mean_seconds == simulate_plan(plan, SETTING.cost).step_seconds
    assert result.tokens_per_second == pytest.approx(32 * 8192 / result.mean_seconds)
    assert result.flops_ratio == pytest.approx(
        step_flops(SHAPE, [8192] * 32) / result.mean_seconds / (16 * HARDWARE.peak_flops_per_second)
    )
    (step,) = result.steps
    assert step.memory_bytes == pytest.approx(SETTING.memory.peak_bytes(8192))
    sharded = replace(SETTING.memory, shard="zero3")
    assert needed_bytes(plan, result.first, sharded) == pytest.approx(sharded.peak_bytes(8192))


@pytest.mark.parametrize(("sequences", "kept"), [(32, 2), (160, 4)])
def test_a_pipeline_keeps_no_more_microbatches_than_it_has(sequences: int, kept: int) -> None:
    """Of 8K each on 16 ranks of 4 stages: the first stage keeps the activations of at most 4."""
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    memory = step_memory(SHAPE, HARDWARE, 16, cut=LayerCut(stages=4))
    setting = replace(SETTING, cost=cost, memory=memory)
    result = run_batches("static", [[8192] * sequences], setting)
    (step,) = result.steps
    assert step.memory_bytes == memory.state_bytes() + memory.microbatch_bytes(8192, kept=kept)


def test_prompts_computed_once_take_the_work_of_their_own_tokens() -> None:
    """On one rank, by hand: 2 prompts of 1,000 tokens before 4 completions of 500; figures are of all sequences."""
    cost, lengths = Cost(linear_seconds=1e-3, quadratic_seconds=1e-6), [1500] * 8
    branches = Branches(completions=4, prompt_tokens=1000)
    setting = replace(SETTING, memory=step_memory(SHAPE, HARDWARE, 1), cost=cost, capacities={"none": 20_000})
    whole, once = (run_batches("lengthwise", [lengths], setting, shared=shared) for shared in (None, branches.shared))
    assert whole.mean_seconds == pytest.approx(8 * (1500 * 1e-3 + 1500**2 * 1e-6))
    pairs = 999**2 + 4 * (1500**2 - 999**2)
    assert once.mean_seconds == pytest.approx(2 * ((999 + 4 * 501) * 1e-3 + pairs * 1e-6))
    assert once.mean("computed_tokens") == 2 * (999 + 4 * 501)
    assert once.steps[0].saved_ratio == pytest.approx(1 - once.mean_seconds / whole.mean_seconds)
    for name in ("num_tokens", "flops", "ideal_seconds"):
        assert once.mean(name) == whole.mean(name)
    assert once.tokens_per_second == pytest.approx(8 * 1500 / once.mean_seconds)
    few = Branches(completions=4, prompt_tokens=120)  # 6 of 8 prompts are 6 % of the tokens, 3 % of the seconds
    would = run_batches("lengthwise", [lengths], setting, shared=few.shared)
    assert (would.step_seconds, whole.steps[0].saved_ratio) == (whole.step_seconds, None)
    assert would.steps[0].saved_ratio == pytest.approx(6 * (119e-3 + 119**2 * 1e-6) / whole.mean_seconds)


def test_trace_shows_chosen_ranks_from_start_to_end() -> None:
    plan = plan_step([50_000, 3000, 3000, 100], CLUSTER, SETTING.cost, PlanOptions(layers=32))
    timeline = simulate_plan(plan, SETTING.cost)
    trace = json.loads(chrome_trace(plan, timeline, ranks_per_node=8, most_ranks=5))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert named == set(chosen_ranks(timeline, 5))
    assert len(named) == 5
    assert int(np.argmax(timeline.work_end_seconds)) in chosen_ranks(timeline, 3)
    assert [chosen_ranks(timeline, 16), len(chosen_ranks(timeline, 1))] == [list(range(16)), 1]
    assert {event["pid"] for event in slices} <= {0, 1}
    for rank in named:
        mine = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == rank)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in itertools.pairwise(mine))
        assert sum(mine[-1]) == pytest.approx(1e6 * timeline.step_seconds)
    rings = [event for event in slices if "ring of" in event["name"]]
    assert all(event["args"]["degree"] > 1 for event in rings)
    assert rings


def test_ideal_seconds_are_arithmetic_alone_spread_evenly() -> None:
    """Of 1,000 and 10 tokens on 16 ranks of 4 stages, and of steps that take twice and eight times as long."""
    peak = HARDWARE.peak_flops_per_second
    linear = 6 * SHAPE.linear_params * 1010 / (peak * HARDWARE.linear_efficiency)
    attention = 7 * 32 * 32 * 128 * (1000**2 + 10**2) / (peak * HARDWARE.attention_efficiency)
    ideal = ideal_seconds([1000, 10], replace(SETTING, memory=step_memory(SHAPE, HARDWARE, 16, cut=LayerCut(stages=4))))
    assert ideal == pytest.approx((linear + attention) / (16 * 4))
    result = run_batches("lengthwise", [[1000, 10]], SETTING)
    (step,) = result.steps
    assert step.ideal_seconds == pytest.approx(4 * ideal)
    slow = tuple(replace(step, ideal_seconds=ideal, step_seconds=times * ideal) for times in (2, 8))
    assert replace(result, steps=slow).ideal_ratio == pytest.approx(2 / 10)


SECONDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@given(ours=SECONDS, factor=st.floats(0.2, 5.0))
def test_a_constant_ratio_has_the_error_of_the_model_alone(ours, factor) -> None:
    gain = gain_over([factor * each for each in ours], ours)
    assert gain.ratio == pytest.approx(factor)
    assert (gain.low, gain.high) == pytest.approx((factor * (1 - MODEL_ERROR), factor * (1 + MODEL_ERROR)), rel=1e-6)
    assert gain.is_equal == (gain.low <= 1 <= gain.high)


def test_spread_over_batches_is_two_standard_errors_and_equal_is_written_as_equal() -> None:
    """Ratio 1.25; residuals -0.5 and 0.5 seconds about it, of mean 4: 2 x 0.7071 / 4 / sqrt(2)."""
    gain = gain_over([4.5, 5.5], [4.0, 4.0], model_error=0.0)
    assert (gain.ratio, gain.high - gain.ratio) == pytest.approx((1.25, 0.25))
    assert str(gain_over([1.04], [1.0])) == "equal (1.04x)"
    assert str(gain_over([1.10], [1.0])) == "1.10x"
    assert str(gain_over([0.5], [1.0])) == "0.50x"
