"""Dynamic and longrope frequencies are those of each sequence's own length, in packs, shards and one after another."""

import copy

import pytest
import torch
from testing import VARIANTS, build_pair, family_difference, make_plan, tiny_family_config

from lengthwise.core.plan import Piece
from lengthwise.models import check_model_config, plain_output
from tiers import some

KINDS = ("llama, rope dynamic", "llama, rope longrope", "phi3, rope longrope")
OF_LAYERS = "gemma3_text, rope longrope in full attention alone"
LENGTHS = (57, 2, 16, 17, 1, 15)  # 16 is the border


def pair_of(variant):
    family, changes = VARIANTS.get(variant, ("gemma3_text", {}))
    if variant == OF_LAYERS:
        kinds = {
            "full_attention": VARIANTS[KINDS[1]][1]["rope_parameters"],
            "sliding_attention": {"rope_type": "default"},
        }
        changes = {"rope_parameters": {kind: {**rope, "rope_theta": 1e4} for kind, rope in kinds.items()}}
    config = tiny_family_config(family, changes)
    check_model_config(config)
    return build_pair(family, config)


@pytest.mark.parametrize("variant", some([*KINDS, OF_LAYERS], 0, -1))
def test_frequencies_are_those_of_each_sequence(variant):
    """One pack of all, cut over all ranks: every row holds parts of sequences on both sides of the border."""
    plan = make_plan(3, LENGTHS, [Piece(ranks=(0, 1, 2), sequences=tuple(range(6)))], layers=2)
    found = family_difference(pair_of(variant), plan, LENGTHS, precision="fp64")
    assert max(found.loss, found.gradient) <= 1e-12


def test_reference_has_no_memory_of_longer_sequences():
    """Plain Hugging Face keeps a dynamic rope's frequencies of the longest row so far; each of ours is a first one."""
    fresh = pair_of(KINDS[0])["plain"]
    used = copy.deepcopy(fresh)
    generator = torch.Generator().manual_seed(0)
    for length in (57, 20, 5, 18):
        ids = torch.randint(48, (length,), generator=generator)
        wanted = copy.deepcopy(fresh)(input_ids=ids[None], use_cache=False).logits
        assert torch.equal(plain_output(used, ids).logits, wanted)
