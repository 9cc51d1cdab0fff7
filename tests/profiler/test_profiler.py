"""A profile of a second: what it runs, and that a step is planned and simulated with what it found."""

from dataclasses import replace

import pytest
import torch
from testing import run_ranks
from testing.laid import whole_parameters

from lengthwise.comm import World
from lengthwise.config import OptimizerConfig
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.models import build_model, find_model
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
from lengthwise.profiler.runs import MESSAGE_BYTES, local_run, message_runs, packs_up_to, ring_runs
from lengthwise.program import check_plan, refuse_unsupported
from tiers import more

SETTINGS = ProfileSettings(seconds=0.5, longest_tokens=256, precision="fp32", clock="wall", hardware="cpu")


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
