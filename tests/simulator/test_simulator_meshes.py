"""The search of meshes: no worse than any mesh of its space; and what a planner is found to take, by hand."""

import itertools
import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lengthwise.core.errors import ConfigError, LengthwiseError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import Cluster, LayerCut
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, step_flops, step_memory
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.simulator import (
    MODEL_ERROR,
    Branches,
    RankMesh,
    Scenario,
    Setting,
    best_mesh,
    chosen_ranks,
    chrome_trace,
    gain_over,
    refuse_unheld,
    simulate_plan,
)
from lengthwise.simulator.found import TooLarge, ideal_seconds, needed_bytes, run_batches
from lengthwise.simulator.rivals import LockStep

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
SCENARIO = Scenario(shape=SHAPE, hardware=HARDWARE, devices=16, context_tokens=2**16, kinds=("none", "layer"))
NO_OFFLOAD = RankMesh(heads="auto")


def test_search_ends_no_later_than_every_mesh() -> None:
    """All and a quarter of the capacity, with and without offload."""
    scenario = replace(SCENARIO, devices=8)
    batches = [draw_lengths("github", 2**18, 0, 2**16)]
    found = best_mesh("lengthwise", batches, scenario)
    for share, offload in product((1, 1 / 4), ("off", "auto")):
        mesh = RankMesh(capacity_share=share, heads="auto", offload=offload)
        other = best_mesh("lengthwise", batches, replace(scenario, only=mesh)).found
        if other is None:
            continue  # sequences that it does not hold
        assert found.found.mean_seconds <= 1.01 * other.mean_seconds, mesh
    assert found.tried <= 28


def test_rings_of_few_thread_blocks_are_slow_for_us_alone() -> None:
    """Gathers, sums and the step's end keep all of the links, and so do the rings of FSDP2."""
    full, rate = SCENARIO, 82e9
    few = replace(full, hardware=replace(HARDWARE, node_ring_bytes_per_second=rate))
    for layout in ("zero1", "zero3"):
        mesh = RankMesh(layout=layout)
        before, after = full.cost_of(mesh), few.cost_of(mesh)
        assert before.near.bytes_per_second == HARDWARE.node_link_bytes_per_second
        assert after.near.bytes_per_second == rate
        assert after.traffic == before.traffic
        assert after.step_end_seconds(8) == before.step_end_seconds(8)
    rival = RankMesh(layout="zero3", lock_step=LockStep(degree=2))
    assert few.cost_of(rival) == full.cost_of(rival)


def test_offload_is_tried_where_only_it_holds_the_sequences() -> None:
    batches = [[60_000, 2000, 3000]]
    scenario = replace(SCENARIO, devices=8, kinds=("none",), context_tokens=60_000)
    assert best_mesh("lengthwise", batches, replace(scenario, base=NO_OFFLOAD)).found is None
    found = best_mesh("lengthwise", batches, scenario).found
    assert found.steps[0].most_offload > 0


def test_a_smaller_capacity_is_found_where_it_ends_sooner() -> None:
    """ByteScale cuts a sequence over the fewest ranks that hold it: with all capacity the longest takes two."""
    scenario = replace(SCENARIO, kinds=("layer",), base=NO_OFFLOAD)
    batches = [[60_000] + [500] * 300]
    found = best_mesh("bytescale", batches, scenario).found
    whole = best_mesh("bytescale", batches, replace(scenario, only=NO_OFFLOAD)).found
    assert found.mesh.capacity_share < 1
    assert found.mean_seconds < 0.8 * whole.mean_seconds


def test_capacities_are_shares_of_what_fits_or_as_given() -> None:
    whole, half = (SCENARIO.setting(RankMesh(capacity_share=share)).capacities for share in (1.0, 0.5))
    assert half == {kind: held // 2 // 128 * 128 for kind, held in whole.items()}
    most = whole["none"]
    assert whole["layer"] > most
    for tokens, expected in ((1000, {"none": 1000, "layer": 1000}), (most + 1, {"layer": most + 1})):
        assert replace(SCENARIO, capacity_tokens=tokens).setting(RankMesh()).capacities == expected
    more = whole["layer"] + 1
    too_much = replace(SCENARIO, capacity_tokens=more)
    with pytest.raises(ConfigError, match=f"at most {more - 1} tokens"):
        too_much.setting(RankMesh())
    assert replace(too_much, takes_capacity=True).setting(RankMesh()).capacities == {"none": more, "layer": more}
    with pytest.raises(ConfigError, match="room for 128 tokens"):
        replace(SCENARIO, shape=named_shape("llama-70b")).setting(RankMesh())


def test_a_plan_that_needs_more_memory_than_a_device_has_is_no_rival() -> None:
    """A layer computed again cannot be offloaded: a whole sequence beside it may need more than a device has."""
    scenario = replace(SCENARIO, kinds=RECOMPUTE_KINDS)
    batches = [[2**17, 2**17, *[3000] * 30]]
    whole = SCENARIO.base
    assert best_mesh("packed-dp", batches, replace(scenario, only=whole)).found is None
    taken = best_mesh("packed-dp", batches, replace(scenario, only=whole, capacity_tokens=40_000, takes_capacity=True))
    assert taken.found.steps[0].memory_bytes > HARDWARE.device_bytes
    found = best_mesh("packed-dp", batches, scenario).found
    assert found.mesh.capacity_share < 1
    assert found.steps[0].memory_bytes <= HARDWARE.device_bytes
    longer = best_mesh("packed-dp", [[2**18, 3000]], scenario)
    assert longer.found is None
    assert "memory of a device" in str(longer.refusal)


def test_where_offload_needs_too_much_memory_the_plan_does_without() -> None:
    scenario = replace(SCENARIO, kinds=RECOMPUTE_KINDS)
    mesh = SCENARIO.base
    setting = scenario.setting(mesh)

    def step_on(device_bytes):
        small = replace(setting, hardware=replace(HARDWARE, device_bytes=device_bytes))
        return run_batches("lengthwise", [[2**17, 2**17, *[3000] * 30]], small).steps[0]

    most = step_on(HARDWARE.device_bytes)
    assert most.most_offload > 0
    less = step_on(most.memory_bytes - 1)
    assert less.memory_bytes < most.memory_bytes
    assert less.most_offload == 0
    assert less.step_seconds >= most.step_seconds
    with pytest.raises(TooLarge, match=r"1\.0 GB"):
        step_on(1e9)


def test_nobody_holds_the_sequences_is_an_error_and_somebody_is_not() -> None:
    scenario = replace(SCENARIO, devices=8, kinds=("none",), base=NO_OFFLOAD, capacity_tokens=2048)
    scenario = replace(scenario, takes_capacity=True)
    with pytest.raises(LengthwiseError, match="20000"):
        refuse_unheld([best_mesh(planner, [[20_000, 7]], scenario) for planner in ("static", "lengthwise")])
    alone = best_mesh("static", [[20_000, 7]], scenario)
    assert alone.found is None
    assert alone.tried == 1
    assert "20000" in str(alone.refusal)


SETTING = Setting(
    memory=step_memory(SHAPE, HARDWARE, 16), hardware=HARDWARE, cost=all_terms_cost(SHAPE, HARDWARE),
    capacities={"none": 8192}, context_tokens=120_000, options=PlanOptions(layers=32),
)  # fmt: skip
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


def test_a_gain_has_the_errors_of_the_model_and_of_the_batches_and_equal_is_written_as_equal() -> None:
    """Ratio 1.25; residuals -0.5 and 0.5 seconds about it, of mean 4: 2 x 0.7071 / 4 / sqrt(2)."""
    gain = gain_over([4.5, 5.5], [4.0, 4.0], model_error=0.0)
    assert (gain.ratio, gain.high - gain.ratio) == pytest.approx((1.25, 0.25))
    alike = gain_over([2.0, 6.0], [1.0, 3.0])
    assert (alike.low, alike.high) == pytest.approx((2 * (1 - MODEL_ERROR), 2 * (1 + MODEL_ERROR)), rel=1e-6)
    assert str(gain_over([1.04], [1.0])) == "equal (1.04x)"
    assert str(gain_over([1.10], [1.0])) == "1.10x"
    assert str(gain_over([0.5], [1.0])) == "0.50x"
