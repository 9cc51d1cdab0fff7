"""Planners compared: the figures of a study, by hand."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import written_tokens
from lengthwise.cost import activation_bytes, all_terms_cost, named_hardware, named_shape, state_bytes, step_flops
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.report.simulation import closing_sentence, simulation_json
from lengthwise.simulator import Setting, chosen_ranks, chrome_trace, compare_planners, simulate_plan

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
SETTING = Setting(
    shape=SHAPE,
    hardware=HARDWARE,
    cost=all_terms_cost(SHAPE, HARDWARE),
    cluster=Cluster(ranks=16, capacity_tokens=8192),
    context_tokens=120_000,
)


def _compare(planners, batches):
    return compare_planners(planners, batches, SETTING, told=lambda *_: None)


def test_step_flops_are_six_a_parameter_and_seven_a_seen_pair() -> None:
    width = 32 * 32 * 128
    assert step_flops(SHAPE, [1000, 10]) == pytest.approx(
        6 * SHAPE.linear_params * 1010 + 7 * width * (1000**2 + 10**2)
    )


def test_study_of_uniform_sequences_has_no_tail_tax() -> None:
    (result,) = _compare(["lengthwise"], [[8192] * 32])
    assert result.tail_tax == pytest.approx(1.0)
    plan = plan_step([8192] * 32, SETTING.cluster, SETTING.cost, PlanOptions(layers=32))
    assert result.mean_seconds == simulate_plan(plan, SETTING.cost).step_seconds
    assert result.tokens_per_second == pytest.approx(32 * 8192 / result.mean_seconds)
    assert result.flops_ratio == pytest.approx(
        step_flops(SHAPE, [8192] * 32) / result.mean_seconds / (16 * HARDWARE.peak_flops_per_second)
    )
    (step,) = result.steps
    assert step.memory_bytes == pytest.approx(state_bytes(SHAPE, 16) + 8192 * activation_bytes(SHAPE, "none", 2))


@pytest.mark.parametrize(("sequences", "kept"), [(16, 1), (32, 2), (160, 4)])
def test_a_pipeline_keeps_no_more_microbatches_than_it_has(sequences: int, kept: int) -> None:
    """Of 8K each on 16 ranks of 4 stages: the first stage keeps the activations of at most 4."""
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    setting = replace(SETTING, cost=cost, devices=4)
    (result,) = compare_planners(["static"], [[8192] * sequences], setting, told=lambda *_: None)
    states = state_bytes(SHAPE, 16, devices=4)
    (step,) = result.steps
    assert step.memory_bytes == pytest.approx(states + kept * 8192 * activation_bytes(SHAPE, "none", 2) / 4)


def test_study_compares_on_the_same_batches() -> None:
    rng = np.random.default_rng(0)
    batches = [[*rng.integers(10, 4000, 60).tolist(), 120_000 - seed] for seed in range(3)]
    static, ours = _compare(["static", "lengthwise"], batches)
    assert len(static.steps) == len(ours.steps) == 3
    assert [step.flops for step in static.steps] == [step.flops for step in ours.steps]
    assert ours.mean_seconds < static.mean_seconds
    assert ours.tail_tax > static.tail_tax
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


@pytest.mark.parametrize(("ranks", "capacity", "alike"), [(1, 4096, 4096), (3, 1000, 3000), (1, 1, 1), (2, 4096, 8192)])
def test_tail_tax_compares_with_sequences_that_fit(ranks: int, capacity: int, alike: int) -> None:
    setting = replace(SETTING, cluster=Cluster(ranks=ranks, capacity_tokens=capacity), context_tokens=1)
    batch = [alike] * 3
    (result,) = compare_planners(["lengthwise"], [batch], setting, told=lambda *_: None)
    assert result.uniform_tokens == alike
    assert result.tail_tax == pytest.approx(1.0)
    assert simulation_json([result], {})["uniform_tokens"] == alike
    assert f"sequences of {written_tokens(alike)} would" in closing_sentence([result], ranks)
