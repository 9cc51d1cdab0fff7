"""Dynamic and longrope frequencies are those of each sequence's own length, in packs, shards and one after another."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import VARIANTS, build_pair, family_difference, make_plan, tiny_family_config
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.models import adapter, check_model_config, plain_output
from lengthwise.models.rope import sequence_lengths
from properties import costliest
from tiers import some

KINDS = ("llama, rope dynamic", "llama, rope longrope", "phi3, rope longrope")
LENGTHS = (57, 2, 16, 17, 1, 31)  # 16 is the border


def pair_of(variant, **more):
    model_type, changes = VARIANTS[variant]
    config = tiny_family_config(model_type, {**changes, **more})
    check_model_config(config)
    return build_pair(model_type, config)


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("ranks", some([1, 2, 3, 5], 2))
def test_frequencies_are_those_of_each_sequence(variant, ranks):
    """One pack of all, cut over all ranks: every row holds parts of sequences on both sides of the border."""
    plan = make_plan(ranks, LENGTHS, [Piece(ranks=tuple(range(ranks)), sequences=tuple(range(6)))], layers=2)
    found = family_difference(pair_of(variant), plan, LENGTHS, precision="fp64")
    assert found.loss <= 1e-13
    assert found.gradient <= 1e-12


@costliest
@given(st.lists(st.sampled_from([1, 2, 3, 15, 16, 17, 18, 37]), min_size=1, max_size=4), st.sampled_from([1, 2, 3]))
def test_any_lengths_have_their_own_frequencies(lengths, ranks):
    lengths = (*lengths, 2)  # one has something to learn
    plan = make_plan(ranks, lengths, [Piece(ranks=tuple(range(ranks)), sequences=(i,)) for i in range(len(lengths))])
    found = family_difference(pair_of(KINDS[0]), plan, lengths, precision="fp64")
    assert found.loss <= 1e-13
    assert found.gradient <= 1e-12


@pytest.mark.parametrize("variant", KINDS)
def test_frequencies_of_the_row_would_be_noticed(variant, monkeypatch):
    monkeypatch.setattr(adapter, "sequence_lengths", lambda model, spans: sequence_lengths(nn.Module(), spans))
    plan = make_plan(1, LENGTHS, [Piece(ranks=(0,), sequences=tuple(range(6)))], layers=2)
    assert family_difference(pair_of(variant), plan, LENGTHS, precision="fp64").gradient > 1e-4


@pytest.mark.parametrize("variant", KINDS)
def test_reference_has_no_memory_of_longer_sequences(variant):
    """Plain Hugging Face keeps a dynamic rope's frequencies of the longest row so far; each of ours is a first one."""
    fresh = pair_of(variant)["plain"]
    used = copy.deepcopy(fresh)
    generator = torch.Generator().manual_seed(0)
    for length in (57, 20, 5, 18):
        ids = torch.randint(48, (length,), generator=generator)
        wanted = copy.deepcopy(fresh)(input_ids=ids[None], use_cache=False).logits
        assert torch.equal(plain_output(used, ids).logits, wanted)


def test_frequencies_of_each_kind_of_layer():
    rope = {
        "full_attention": {**VARIANTS[KINDS[1]][1]["rope_parameters"]},
        "sliding_attention": {"rope_type": "default"},
    }
    for each in rope.values():
        each["rope_theta"] = 1e4
    config = tiny_family_config("gemma3_text", {"rope_parameters": rope})
    check_model_config(config)
    plan = make_plan(3, LENGTHS, [Piece(ranks=(0, 1, 2), sequences=tuple(range(6)))], layers=2)
    found = family_difference(build_pair("gemma3_text", config), plan, LENGTHS, precision="fp64")
    assert found.gradient <= 1e-12


def test_rotary_module_of_one_layer_is_refused():
    """Recomputation would run it again, outside the block that knows the lengths."""

    class Layer(GradientCheckpointingLayer):
        def __init__(self, rotary):
            super().__init__()
            self.rotary = rotary

    model = nn.ModuleDict({"layer": Layer(pair_of(KINDS[0])["planned"].model.rotary_emb)})
    with (
        pytest.raises(ModelRefused, match=r"layer\.rotary \(LlamaRotaryEmbedding\).*Needed"),
        sequence_lengths(model, []),
    ):
        pass
