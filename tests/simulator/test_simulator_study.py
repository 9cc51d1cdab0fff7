"""Planners compared: the figures of a study, by hand."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape, step_flops, step_memory
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.simulator import Setting, chosen_ranks, chrome_trace, compare_planners, simulate_plan
from lengthwise.simulator.study import ideal_seconds

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
SETTING = Setting(
    shape=SHAPE,
    hardware=HARDWARE,
    cost=all_terms_cost(SHAPE, HARDWARE),
    cluster=Cluster(ranks=16, capacity_tokens=8192),
    context_tokens=120_000,
)


def _compare(planners, batches):
    return compare_planners(planners, batches, SETTING, progress=lambda *_: None)


def test_study_of_uniform_sequences() -> None:
    (result,) = _compare(["lengthwise"], [[8192] * 32])
    plan = plan_step([8192] * 32, SETTING.cluster, SETTING.cost, PlanOptions(layers=32))
    assert result.mean_seconds == simulate_plan(plan, SETTING.cost).step_seconds
    assert result.tokens_per_second == pytest.approx(32 * 8192 / result.mean_seconds)
    assert result.flops_ratio == pytest.approx(
        step_flops(SHAPE, [8192] * 32) / result.mean_seconds / (16 * HARDWARE.peak_flops_per_second)
    )
    (step,) = result.steps
    assert step.memory_bytes == pytest.approx(step_memory(SHAPE, HARDWARE, 16).peak_bytes(8192))


@pytest.mark.parametrize(("sequences", "kept"), [(16, 1), (32, 2), (160, 4)])
def test_a_pipeline_keeps_no_more_microbatches_than_it_has(sequences: int, kept: int) -> None:
    """Of 8K each on 16 ranks of 4 stages: the first stage keeps the activations of at most 4."""
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    setting = replace(SETTING, cost=cost, devices=4)
    (result,) = compare_planners(["static"], [[8192] * sequences], setting, progress=lambda *_: None)
    memory = step_memory(SHAPE, HARDWARE, 16, stages=4)
    (step,) = result.steps
    assert step.memory_bytes == memory.state_bytes() + memory.microbatch_bytes(8192, kept=kept)
    assert step.memory_bytes == pytest.approx(memory.state_bytes() + kept * 8192 * memory.saved_bytes("none"), rel=0.08)


def test_study_compares_on_the_same_batches() -> None:
    rng = np.random.default_rng(0)
    batches = [[*rng.integers(10, 4000, 60).tolist(), 120_000 - seed] for seed in range(3)]
    static, ours = _compare(["static", "lengthwise"], batches)
    assert len(static.steps) == len(ours.steps) == 3
    assert [step.flops for step in static.steps] == [step.flops for step in ours.steps]
    assert ours.mean_seconds < static.mean_seconds
    assert 1 > ours.ideal_ratio > static.ideal_ratio
    times = [step.step_seconds for step in ours.steps]
    assert ours.percentile_seconds(50) == sorted(times)[1]
    assert ours.percentile_seconds(100) == max(times)
    assert ours.mean("idle_ratio") == pytest.approx(np.mean([step.idle_ratio for step in ours.steps]))


def test_trace_shows_chosen_ranks_from_start_to_end() -> None:
    plan = plan_step([50_000, 3000, 3000, 100], SETTING.cluster, SETTING.cost, PlanOptions(layers=32))
    timeline = simulate_plan(plan, SETTING.cost)
    trace = json.loads(chrome_trace(plan, timeline, ranks_per_node=8, most_ranks=5))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert named == set(chosen_ranks(timeline, 5))
    assert len(named) == 5
    assert {event["pid"] for event in slices} <= {0, 1}
    for rank in named:
        mine = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == rank)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in itertools.pairwise(mine))
        assert sum(mine[-1]) == pytest.approx(1e6 * timeline.step_seconds)
    rings = [event for event in slices if "ring of" in event["name"]]
    assert all(event["args"]["degree"] > 1 for event in rings)
    assert rings


def test_all_ranks_are_shown_where_they_are_few() -> None:
    plan = plan_step([5000] * 20, SETTING.cluster, SETTING.cost, PlanOptions(layers=32))
    timeline = simulate_plan(plan, SETTING.cost)
    assert chosen_ranks(timeline, 16) == list(range(16))
    assert int(np.argmax(timeline.work_end_seconds)) in chosen_ranks(timeline, 3)
    assert len(chosen_ranks(timeline, 1)) == 1


def test_ideal_seconds_are_arithmetic_alone_spread_evenly() -> None:
    """Of 1,000 and 10 tokens on 16 ranks of 4 devices, and of steps that take twice and eight times as long."""
    peak = HARDWARE.peak_flops_per_second
    linear = 6 * SHAPE.linear_params * 1010 / (peak * HARDWARE.linear_efficiency)
    attention = 7 * 32 * 32 * 128 * (1000**2 + 10**2) / (peak * HARDWARE.attention_efficiency)
    ideal = ideal_seconds([1000, 10], replace(SETTING, devices=4))
    assert ideal == pytest.approx((linear + attention) / (16 * 4))
    (result,) = _compare(["lengthwise"], [[1000, 10]])
    (step,) = result.steps
    assert step.ideal_seconds == pytest.approx(4 * ideal)
    slow = tuple(replace(step, ideal_seconds=ideal, step_seconds=times * ideal) for times in (2, 8))
    assert replace(result, steps=slow).ideal_ratio == pytest.approx(2 / 10)
