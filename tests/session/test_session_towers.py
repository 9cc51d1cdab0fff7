"""A model with towers trains on rows of text as in the plain loop, its towers as they were; it is saved whole."""

import copy
from functools import partial

import pytest
import torch
from loops import VOCAB, in_double, in_ranks, plain_loop, planned_loop, steps_of
from testing.towers import tiny_tower_config
from transformers import AutoModelForImageTextToText

from lengthwise import Session
from lengthwise.core.errors import DataError
from tiers import more

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
CONSTANT = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
STEPS = steps_of()[:2]


def model_of(whole, text, others):
    torch.manual_seed(0)
    names = ("vocab_size", "vocab_size_per_layer_input") if text.startswith("gemma4") else ("vocab_size",)
    config = tiny_tower_config(whole, text, dict.fromkeys(names, VOCAB), **others)
    how = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    return AutoModelForImageTextToText.from_config(config, **how).double().train()


@pytest.mark.parametrize(
    ("ranks", "options", "whole", "text", "others"),
    [
        (2, {"shard": "zero3"}, "qwen3_vl", "qwen3_vl_text", {"tie_word_embeddings": True}),
        (2, {"stages": 2}, "mistral3", "mistral", {}),
        more(2, {"stages": 2}, "qwen3_vl", "qwen3_vl_text", {"tie_word_embeddings": True}),
        more(2, {"shard": "zero3"}, "gemma4", "gemma4_text", {}),
        more(4, {"shard": "hybrid", "ranks_per_node": 2}, "glm4v", "glm4v_text", {}),
        more(3, {}, "internvl", "qwen3_moe", {}),
        more(1, {}, "gemma3", "gemma3_text", {}),
    ],
)
def test_a_loop_over_all_parameters_is_the_plain_loop(ranks, options, whole, text, others, tmp_path):
    capacity = 64 if ranks > options.get("stages", 1) else 128

    def work(rank):
        model = model_of(whole, text, others)
        plain, optimizer = copy.deepcopy(model), ADAMW(model.parameters())
        with Session(model, optimizer, capacity_tokens=capacity, **options) as session:
            found = planned_loop(session, optimizer, CONSTANT(optimizer), STEPS)
            session.save_pretrained(tmp_path / "saved")
        optimizer = ADAMW(plain.parameters())
        expected = plain_loop(plain, optimizer, CONSTANT(optimizer), STEPS)
        if rank:
            return 0.0, 0.0
        saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert type(saved) is type(model) is type(plain)
        own, reference = saved.state_dict(), plain.state_dict()
        assert own.keys() == reference.keys()
        text_part = ("model.language_model.", "lm_head.")
        assert all(torch.equal(own[name], reference[name]) for name in own if not name.startswith(text_part))
        return (
            max(abs(a / b - 1) for a, b in zip(sum(found, ()), sum(expected, ()), strict=True)),
            max((own[name] - each).norm() / each.norm() for name, each in reference.items() if each.norm()).item(),
        )

    for numbers, weights in in_ranks(in_double(work), ranks, tmp_path):
        assert numbers < 1e-12
        assert weights < 1e-11


def test_rows_with_images_are_refused_by_row_and_token():
    model = model_of("gemma3", "gemma3_text", {"image_token_index": 7})
    said = r"sequence 1, input_ids: expected tokens of text; got the token 7, .*image_token_index"
    with (
        Session(model, ADAMW(model.parameters()), capacity_tokens=64) as session,
        pytest.raises(DataError, match=said),
    ):
        session.backward([[1, 2, 3], [4, 7, 5]])
