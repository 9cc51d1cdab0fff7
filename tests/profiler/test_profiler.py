"""A profile of a second: what it runs, and that a step is planned and simulated with what it found."""

from dataclasses import replace

import pytest
import torch
from testing import run_ranks
from testing.laid import whole_parameters

from lengthwise.comm import SoloTransport, World
from lengthwise.config import OptimizerConfig
from lengthwise.core.shape import Cluster
from lengthwise.cost.measured import measured_cost, read_measurements
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.models import build_model, find_model
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
from lengthwise.profiler.runs import MESSAGE_BYTES, local_run, message_runs, packs_up_to, ring_runs
from lengthwise.program import check_plan, refuse_unsupported
from lengthwise.run.profiling import profile_model
from lengthwise.simulator import simulate_plan
from tiers import more

SETTINGS = ProfileSettings(seconds=0.5, longest_tokens=256, precision="fp32", clock="wall", hardware="cpu")


@pytest.mark.exhaustive
def test_a_profile_of_one_process_makes_costs_that_plan_a_step(tmp_path):
    torch.set_num_threads(1)
    found = profile(find_model("tiny"), World(rank=0, world_size=1), SoloTransport(), SETTINGS)
    kinds = {"local", "block", "ring_block", "embedding", "head", "end_update", "end_clear"}
    assert {each.kind for each in found.samples} == kinds
    assert "near_bytes_per_second" in found.fit.not_measured
    path = tmp_path / "measurements.json"
    path.write_text(found.to_json())
    cost = measured_cost(read_measurements(path))
    assert cost.linear_seconds > 0
    plan = plan_step([3000, 500, 20], Cluster(ranks=3, capacity_tokens=2048), cost, PlanOptions(layers=2))
    check_plan(plan)
    assert simulate_plan(plan, cost).step_seconds > cost.step_end_seconds(3) > 0


@pytest.mark.exhaustive
def test_a_profile_of_two_processes_measures_rings_and_messages():
    found = profile_model("tiny", SETTINGS, ranks=2, device="cpu")
    assert found is not None
    assert {each.kind for each in found.samples} >= {"ring", "transfer", "end_collectives"}
    assert all(each.tier == "near" for each in found.samples if each.kind == "ring")
    always = {"far_bytes_per_second", "far_hop_seconds", "copy_bytes_per_second"}
    assert always == set(found.fit.not_measured) - {"near_bytes_per_second"}
    assert (found.place.ranks, found.place.ranks_per_node) == (2, 2)
    assert {"none", "near"} == {each.tier for each in found.samples}


@pytest.mark.parametrize("ranks", [1, more(2)])
def test_a_model_that_is_to_be_trained_stays_as_it_is_to_the_bit(ranks):
    settings = replace(SETTINGS, seconds=0.05, longest_tokens=64, precision="bf16")
    source = find_model("tiny")

    def work(transport):
        model = build_model(source, seed=3)
        parameters = whole_parameters(model, transport, dtype=torch.bfloat16)
        before = [each.clone() for each in (parameters.values, parameters.master_weights)]
        torch.manual_seed(transport.rank)
        drawn = torch.random.get_rng_state()
        world = World(rank=transport.rank, world_size=ranks, local_rank=transport.rank, local_size=ranks)
        optimizer = sliced_optimizer(OptimizerConfig(weight_decay=0.5), model, parameters, transport.rank)
        parameters.grads.fill_(7)  # of no step
        profile(source, world, transport, settings, trained=(model, parameters, optimizer))
        after = [parameters.values, parameters.master_weights]
        assert not any(each.any() for each in optimizer.vectors().values())
        assert not parameters.grads.any()
        assert torch.equal(drawn, torch.random.get_rng_state())
        return all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    assert run_ranks(work, ranks) == [True] * ranks


def test_what_is_run_is_made_of_plans_that_training_runs():
    for run in (local_run((5, 9), 3, 2), *ring_runs((40,), 6, 4, 2)):
        assert run.plan is not None
        check_plan(run.plan)
        refuse_unsupported(run.plan)
    rings = ring_runs((40,), 6, 4, 2)
    assert [(each.degree, each.tier) for each in rings] == [(2, "near"), (4, "near"), (6, "far"), (2, "far")]
    assert {each.tier for each in message_runs(6, 4)} == {"near", "far"}
    assert message_runs(1, 1) == []
    assert {each.num_bytes for each in message_runs(2, 2, times=16)} == {16 * size for size in MESSAGE_BYTES}
    assert all(length > 0 for longest in (1, 32, 4096) for pack in packs_up_to(longest) for length in pack)
