"""Dropout follows the plan: it is drawn alike in a recomputation and when a step runs again."""

import itertools

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from testing import MODEL_TYPES, build_pair, make_batch, make_plan, run_step, tiny_family_config, tiny_model
from testing.tiny import VOCAB
from torch import nn

from lengthwise.core.plan import Piece
from lengthwise.engine import step
from lengthwise.models import DropoutKey, check_model_config, drawing, stop_dropping
from lengthwise.models.dropout import DROPOUT_FAMILIES, DROPOUT_KEYS
from models.test_models_checkpointing import LENGTHS, recomputing
from models.test_models_families import NOT_RECOMPUTED
from tiers import some

CPU = torch.device("cpu")
PARTS = (tuple(range(len(LENGTHS) // 2)), tuple(range(len(LENGTHS) // 2, len(LENGTHS))))
PLAN = make_plan(1, LENGTHS, [Piece(ranks=(0,), sequences=part) for part in PARTS])


def test_seeds_differ_by_seed_step_and_place_and_a_forward_leaves_the_generator():
    two = (0, 1)
    keys = [DropoutKey(seed=seed, step=step) for seed in two for step in two]
    assert len({key.at(*place) for key in keys for place in itertools.product(two, two, two)}) == 32
    before = torch.get_rng_state()
    steps(gpt2(0.3), PLAN)
    assert torch.equal(torch.get_rng_state(), before)


def steps(model, plan, **how):
    batch = make_batch(LENGTHS, vocab=VOCAB, seed=1, masked=0.2)
    return run_step(model, plan, batch, dropout=DropoutKey(seed=3, step=2), **how)


def test_every_rank_and_microbatch_draws_from_a_seed_of_its_own(monkeypatch):
    seeds = []
    monkeypatch.setattr(step, "drawing", lambda seed, device: (seeds.append(seed), drawing(seed, device))[1])
    pieces = [[Piece(ranks=(0,), sequences=part[:1]), Piece(ranks=(1,), sequences=part[1:])] for part in PARTS]
    steps(gpt2(0.3), make_plan(2, LENGTHS, pieces))
    assert len(set(seeds)) == len(seeds) == 4


def assert_same(found, expected):
    assert found.loss == pytest.approx(expected.loss, rel=1e-13)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("model_type", some([name for name in DROPOUT_FAMILIES if name in MODEL_TYPES], 0, 3))
def test_recomputed_layers_drop_what_the_forward_dropped(model_type):
    """In all places of dropout; `run/test_run_dropout.py` has rings, because ranks in threads share a generator."""
    config = tiny_family_config(model_type)
    asked = [key for key in DROPOUT_KEYS if hasattr(config, key)]
    for number, key in enumerate(asked):
        setattr(config, key, 0.2 + 0.1 * number)
    assert asked
    check_model_config(config)
    model = build_pair(model_type, config)["planned"]
    expected = steps(model, PLAN)
    assert_same(steps(model, PLAN), expected)
    if model_type not in NOT_RECOMPUTED:
        assert_same(steps(model, recomputing(PLAN, "layer", "all_but_attention")), expected)
    assert stop_dropping(model)
    whole = steps(model, PLAN)
    assert whole.loss != pytest.approx(expected.loss, rel=1e-6)
    assert_same(whole, steps(tiny_model(model_type), PLAN))


def test_dropout_of_adapters_in_layers_with_states_is_recomputed():
    model = tiny_model("lfm2")
    linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    names = sorted(linear - {"lm_head", "out_proj"})
    chosen = LoraConfig(r=4, lora_dropout=0.3, target_modules=names, init_lora_weights=False)
    inject_adapter_in_model(chosen, model.requires_grad_(False))
    assert_same(steps(model, recomputing(PLAN, "layer", "all_but_attention", "elementwise")), steps(model, PLAN))


def gpt2(p):
    return tiny_model("gpt2", {"resid_pdrop": p, "embd_pdrop": p})


def test_evaluations_drop_nothing():
    batch = make_batch(LENGTHS, vocab=VOCAB)
    evaluated, plain = (run_step(gpt2(p), PLAN, batch, train=False).loss for p in (0.3, 0.0))
    assert evaluated == pytest.approx(plain, rel=1e-14)
