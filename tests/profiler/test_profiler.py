"""A profile of a second: what it runs, and that a step is planned and simulated with what it found."""

import time
from dataclasses import replace

import pytest
import torch
from testing import run_ranks
from testing.images import write_image_model
from testing.laid import whole_parameters

from cost.measured_samples import base, samples_of
from lengthwise.comm import World
from lengthwise.config import OptimizerConfig
from lengthwise.cost.fit import fit_samples
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.models import build_model, find_model
from lengthwise.profiler.rank_profiler import ProfileSettings, build, profile
from lengthwise.profiler.runs import MESSAGE_BYTES, local_run, message_runs, packs_up_to, ring_runs
from lengthwise.program import check_plan, refuse_unsupported
from tiers import more

SETTINGS = ProfileSettings(seconds=0.5, longest_tokens=256, precision="fp32", clock="wall", hardware="cpu")
WORLD = World(rank=0, world_size=1, local_rank=0, local_size=1)
SLEPT = 3e-4  # seconds a patch


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


@pytest.mark.parametrize("trains", [False, more(True)])
def test_a_slow_tower_is_measured_as_slow(tmp_path, trains):
    source = find_model(str(write_image_model(tmp_path)), train_towers=trains)
    machine = [each for each in samples_of(replace(base(), linear_seconds=1e-4)) if each.kind != "images"]

    def work(transport):
        trained = build(source, WORLD, transport, "fp32")
        block = trained[0].model.visual.blocks[0]
        block.register_forward_pre_hook(lambda _, given: time.sleep(SLEPT * len(given[0])))
        found = profile(source, WORLD, transport, SETTINGS, trained=trained)
        assert not trained[1].grads.any()
        return [each for each in found.samples if each.kind == "images"]

    (images,) = run_ranks(work, 1)
    assert [each.lengths for each in images[:2]] == [(16,), (64,)]
    slept, counted = SLEPT * 4 * (64 - 16), images[1].image_work - images[0].image_work
    ratio = fit_samples([*machine, *images], base()).terms["image_ratio"].value
    assert 0.6 * slept < ratio * 1e-4 * counted < 3 * slept


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
