"""Dropout: what falls out is a function of seed, step, sequence, position and place, whatever the plan."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from testing import MODEL_TYPES, build_pair, family_difference, make_batch, make_plan, run_step, tiny_family_config
from testing.tiny import VOCAB
from torch import nn

from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.core.trained import FAMILIES, LAYER_TYPES, layer_types
from lengthwise.models import DropoutKey, KeyedDropout, check_model_config, token_keys
from lengthwise.models.dropout import DROPOUT_FAMILIES, DROPOUT_KEYS, drop
from models.test_models_checkpointing import recomputing
from models.test_models_families import LENGTHS, NOT_RECOMPUTED, SPLIT, planned
from tiers import more, some

WORD = (1 << 64) - 1


def mix(state, value):
    """SplitMix64 as its authors write it, `value` steps on, in Python's own numbers."""
    word = (state + value * 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def test_the_generator_is_splitmix64():
    """The first outputs of seed 1234567, as in published test vectors."""
    assert [mix(1234567, number) for number in (1, 2, 3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423
    ]  # fmt: skip


@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**20),
    st.integers(1, 500), st.floats(0.0, 1.0, exclude_min=True),
)  # fmt: skip
def test_an_entry_falls_out_by_its_own_place_alone(seed, step, sequence, position, place, p):
    keys = token_keys(DropoutKey(seed=seed, step=step), torch.tensor([3, sequence]), torch.tensor([9, position]))
    found = drop(torch.ones(2, 6, dtype=torch.float64), p, keys, place)[1]
    word = mix(mix(mix(mix(mix(0, seed), step), sequence), position), place)
    stays = [mix(word, column) & 0xFFFFFFFF >= round(p * 2**32) for column in range(6)]
    assert found.tolist() == pytest.approx([stay / (1 - p) if stay else 0.0 for stay in stays])


def test_dropout_is_cut_into_parts_without_a_change(monkeypatch):
    keys, x = torch.arange(50), torch.randn(50, 7, 3, requires_grad=True)
    whole = drop(x, 0.4, keys, 2)
    monkeypatch.setattr("lengthwise.models.dropout._AT_ONCE", 64)
    assert torch.equal(drop(x, 0.4, keys, 2), whole)
    whole.sum().backward()
    assert torch.equal(x.grad != 0, whole != 0)
    assert not drop(x, 1.0, keys, 2).any()


def test_other_random_numbers_and_tokens_without_a_row_are_refused():
    with KeyedDropout(torch.arange(5)):
        assert F.dropout(torch.ones(1, 5, 4), 0.5).shape == (1, 5, 4)
        assert F.dropout(torch.ones(5, 4), 0.5).shape == (5, 4)
        assert F.dropout(torch.ones(1, 1, 5, 4), 0.5).shape == (1, 1, 5, 4)
        assert torch.equal(F.dropout(torch.ones(3, 4), 0.5, training=False), torch.ones(3, 4))
        for draw in (lambda: F.dropout(torch.ones(3, 4)), lambda: F.alpha_dropout(torch.ones(5, 4)),
                     lambda: torch.ones(5).uniform_()):  # fmt: skip
            with pytest.raises(ModelRefused, match="one row per token"):
                draw()
    with KeyedDropout(None):
        assert torch.equal(F.dropout(torch.ones(3, 4), 0.5), torch.ones(3, 4))


@pytest.mark.parametrize("model_type", some([name for name in DROPOUT_FAMILIES if name in MODEL_TYPES], 0, 3))
def test_family_with_dropout_equals_plain_hugging_face_that_draws_the_same(model_type):
    """All places of dropout; recomputed layers, a ring, packs and split heads."""
    config = tiny_family_config(model_type)
    asked = [key for key in DROPOUT_KEYS if hasattr(config, key)]
    for number, key in enumerate(asked):
        setattr(config, key, 0.2 + 0.1 * number)
    assert asked
    check_model_config(config)
    pair = build_pair(model_type, config)
    plans = [planned()]
    if model_type not in NOT_RECOMPUTED:
        plans += [
            recomputing(planned(), "layer", "all_but_attention"),
            recomputing(SPLIT, "all_but_attention", "layer"),
        ]
    for plan in plans:
        found = family_difference(pair, plan, LENGTHS, precision="fp64", logits_at_once=7 * VOCAB)
        assert found.loss <= 1e-13
        assert found.gradient <= 1e-12


@pytest.mark.parametrize("model_type", ["lfm2", *map(more, ("kimi_linear", "nemotron_h", "qwen3_5_text"))])
def test_dropout_of_adapters_in_layers_with_states_equals_plain_hugging_face(model_type):
    """On all that may have an adapter, latents of one row a token for all heads among it."""
    pair = build_pair(model_type, tiny_family_config(model_type))
    linear = {name.rpartition(".")[2] for name, each in pair["plain"].named_modules() if isinstance(each, nn.Linear)}
    chosen = LoraConfig(r=4, lora_dropout=0.3, target_modules=sorted(linear - {"lm_head", "out_proj"}))
    for model in pair.values():
        inject_adapter_in_model(chosen, model.requires_grad_(False))
        draw = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=draw) * 0.3
    plan = recomputing(planned(), "layer", "all_but_attention")
    found = family_difference(pair, plan, LENGTHS, precision="fp64")
    assert found.loss <= 1e-13
    assert found.gradient <= 1e-12


def test_dropout_that_configs_of_families_with_states_name_is_refused():
    """In attention, and Nemotron-H's `hidden_dropout`, which Hugging Face does not read."""
    for model_type in (name for name in FAMILIES if len(layer_types(name)) > len(LAYER_TYPES)):
        for key in ("attention_dropout", "hidden_dropout"):
            config = tiny_family_config(model_type)
            setattr(config, key, 0.1)
            with pytest.raises(ModelRefused, match=f"model config: {key}: expected 0 .* got 0.1"):
                check_model_config(config)


def gpt2(p):
    return build_pair("gpt2", tiny_family_config("gpt2", {"resid_pdrop": p, "embd_pdrop": p}))["planned"]


def test_dropout_depends_on_seed_and_step_and_evaluations_have_none():
    batch = make_batch(LENGTHS, vocab=VOCAB)
    keys = [DropoutKey(seed=seed, step=step) for seed, step in ((0, 1), (0, 2), (1, 1), (0, 1))]
    plan = make_plan(1, LENGTHS, [Piece(ranks=(0,), sequences=tuple(range(len(LENGTHS))))])
    losses = [run_step(gpt2(0.3), plan, batch, dropout=key).loss for key in keys]
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3
    evaluated, plain = (run_step(gpt2(p), plan, batch, train=False).loss for p in (0.3, 0.0))
    assert evaluated == pytest.approx(plain, rel=1e-14)
