"""A model with towers trains on rows of text as in the plain loop, its towers as they were; it is saved whole."""

from functools import partial

import pytest
import torch
from testing.small import VOCAB
from testing.towers import tiny_tower_config
from transformers import AutoModelForImageTextToText

from lengthwise import Session
from lengthwise.core.errors import DataError

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def model_of(whole, text, others):
    torch.manual_seed(0)
    names = ("vocab_size", "vocab_size_per_layer_input") if text.startswith("gemma4") else ("vocab_size",)
    config = tiny_tower_config(whole, text, dict.fromkeys(names, VOCAB), **others)
    how = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    return AutoModelForImageTextToText.from_config(config, **how).double().train()


def test_rows_with_images_are_refused_by_row_and_token():
    model = model_of("gemma3", "gemma3_text", {"image_token_index": 7})
    said = r"sequence 1, input_ids: expected tokens of text; got the token 7, .*image_token_index"
    with (
        Session(model, ADAMW(model.parameters()), capacity_tokens=64) as session,
        pytest.raises(DataError, match=said),
    ):
        session.backward([[1, 2, 3], [4, 7, 5]])
