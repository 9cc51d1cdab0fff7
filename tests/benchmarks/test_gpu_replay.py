"""Loops on one device: the replay of plans, put together as simulated, and steps as plain Hugging Face takes them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import relative_error

from gpu import loops
from gpu.loops import OurLoop, PlainLoop
from gpu.replay import makespan_of
from gpu.setting import PLANNERS, plan_for
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.engine.batch import random_batch
from lengthwise.planner import PlanOptions
from lengthwise.simulator import RankMesh, Scenario, simulate_plan
from lengthwise.simulator.rivals import LockStep
from lengthwise.simulator.rounds import microbatch_clocks
from properties import costly

CPU = torch.device("cpu")
COST = all_terms_cost(named_shape("llama-7b"), replace(named_hardware("h100"), node_uplink_bytes_per_second=1e18))


def simulated_seconds(plan, cost):
    """Return what each rank computes in each of its microbatches."""
    seconds = {}
    for index, microbatch in enumerate(plan.microbatches):
        clocks = microbatch_clocks(microbatch, plan.tokens, cost)
        seconds |= {(rank, index): each for rank, each in zip(clocks.ranks, clocks.compute.tolist(), strict=True)}
    return seconds


@costly
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    ranks=st.sampled_from([1, 3, 8]),
    planner=st.sampled_from(PLANNERS),
)
def test_microbatches_as_simulated_make_the_simulated_makespan(lengths, ranks, planner):
    cluster = Cluster(ranks=ranks, capacity_tokens=max(8192, -(-max(lengths) // ranks) + 1))
    plan = plan_for(lengths, COST, cluster, planner=planner, layers=32)
    seconds = simulated_seconds(plan, COST)
    simulated = float(simulate_plan(plan, COST).work_end_seconds.max())
    assert makespan_of(plan, seconds, COST) == pytest.approx(simulated, rel=0.02)
    slower = {key: 2 * each for key, each in seconds.items()}
    assert makespan_of(plan, slower, COST) > 1.3 * makespan_of(plan, seconds, COST)


@pytest.mark.parametrize("degree", [1, 4])
def test_waves_as_simulated_make_the_simulated_makespan(degree):
    """A wave waits for its slowest ranks, and its gathers, which packs of few tokens do not hide, come on top."""
    how, shape = LockStep(degree=degree), named_shape("llama-7b")
    scenario = Scenario(
        shape=shape, hardware=replace(named_hardware("h100"), node_link_bytes_per_second=2e10), devices=8
    )
    cost = scenario.cost_of(RankMesh(layout="zero3", lock_step=how))
    lengths = [*range(100, 4000, 300)] * 8
    plan = how(lengths, Cluster(ranks=8, capacity_tokens=4096), cost, PlanOptions(layers=32))
    seconds = simulated_seconds(plan, cost)
    found, simulated = makespan_of(plan, seconds, cost), float(simulate_plan(plan, cost).work_end_seconds.max())
    assert found == pytest.approx(simulated, rel=0.02)
    assert found > 1.3 * makespan_of(plan, seconds, replace(cost, traffic=None))


LENGTHS = [50, 3, 20, 1, 30]


@pytest.mark.parametrize(("packed", "recompute"), [(False, "none"), (True, "layer")])
def test_rivals_take_the_same_steps(packed, recompute):
    cost = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
    cluster = Cluster(ranks=1, capacity_tokens=64)
    plan = plan_for(LENGTHS, cost, cluster, layers=2, recompute=recompute)
    assert {each.recompute for each in plan.microbatches} == {recompute}
    batch = random_batch(LENGTHS, vocab=256)
    ours = OurLoop("tiny", CPU, torch.float32)
    rival = PlainLoop("tiny", CPU, torch.float32, packed=packed, pack_tokens=64)
    for _ in range(3):
        assert rival.step(plan, batch) == pytest.approx(ours.step(plan, batch), rel=1e-5)
    assert relative_error(rival.parameters.values, ours.parameters.values) < 1e-6
    assert rival.model.config._attn_implementation == (loops.VARLEN if packed else "sdpa")
