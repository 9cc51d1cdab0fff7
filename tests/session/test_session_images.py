"""Rows with images train as in plain Hugging Face: cut through images, packed with rows of text, over any ranks."""

import copy
import warnings
from functools import partial

import pytest
import torch
from loops import both_loops, in_double, in_ranks
from peft import LoraConfig, get_peft_model
from testing.images import IMAGE, SPECS, TEXTS, image_model, image_rows
from testing.small import VOCAB, plain_loop
from testing.towers import tiny_tower_config
from transformers import AutoModelForImageTextToText

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError
from lengthwise.models import IMAGE_FAMILIES, image_reader, text_part
from lengthwise.session.row_batch import RowBatch
from tiers import more

SGD = partial(torch.optim.SGD, lr=0.05)
LAYOUTS = [{"shard": "zero1"}, {"shard": "zero3", "recompute": "layer"}]


def test_every_family_that_sees_is_tried():
    assert set(IMAGE_FAMILIES) == set(TEXTS)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("internvl", 2),
        *(more(family, ranks) for family in TEXTS for ranks in (1, 2, 3, 4)),
    ],
)
def test_rows_with_images_train_as_in_the_plain_loop(family, ranks, tmp_path):
    def work(_rank):
        found = []
        for layout in LAYOUTS:
            model = image_model(family)
            steps = [image_rows(model), image_rows(model, SPECS[2:], seed=1)]
            found.append(both_loops(SGD, model=model, steps=steps, capacity=24 if ranks > 1 else 100, **layout))
        return found

    for found in in_ranks(in_double(work), ranks, tmp_path):
        assert max(map(max, found)) < 1e-11


def test_answers_about_an_image_share_its_tokens_and_adapters_train(tmp_path):
    """Answers about another image of the same size share nothing with them but what comes before it."""

    def work(_rank):
        model = image_model("qwen3_vl")
        rows = []
        for number in range(8):
            (row,) = image_rows(model, [[3, (8, 8), 40]], seed=number // 4)
            ids = image_rows(model, [[3, (8, 8), 40]])[0]["input_ids"]
            ids[-6:] = torch.randint(1, 50, (6,), generator=torch.Generator().manual_seed(number))
            labels = torch.where(torch.arange(len(ids)) < len(ids) - 6, -100, ids)
            rows.append({**row, "input_ids": ids, "labels": labels})
        shared = RowBatch(rows, reader=image_reader(text_part(model))).shared_prefixes()
        torch.manual_seed(2)
        config = LoraConfig(r=4, target_modules=r".*language_model.*q_proj", init_lora_weights=False)
        with warnings.catch_warnings(action="ignore"):  # peft reads a deprecated attribute
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        plain = copy.deepcopy(adapted)
        with Session(adapted, SGD(adapted.parameters()), capacity_tokens=600, shard="zero1") as session:
            result = session.backward(rows)
            session.optimizer.step()
        optimizer = SGD([each for each in plain.parameters() if each.requires_grad])
        ((loss, _),) = plain_loop(
            plain, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), [rows], limit=1e9
        )
        apart = [(a - b).norm() / b.norm() for a, b in zip(adapted.parameters(), plain.parameters(), strict=True)]
        return shared.common, len(result.plan.tokens) - len(rows), abs(result.loss - loss) / loss, max(apart)

    for common, beginnings, *found in in_ranks(in_double(work), 2, tmp_path):
        assert sorted(common) == [0, 0, *[53] * 6], common
        assert beginnings == 2
        assert max(found) < 1e-11


def test_a_tower_gets_no_gradients_and_other_images_make_other_steps():
    """Even a tower that asks for gradients; and ranks compare what they were given before they run it."""
    model = image_model("qwen3_vl", torch.float32)
    model.model.visual.requires_grad_(True)
    first, other = (image_rows(model, [[2, (4, 4), 3]], seed=seed) for seed in (0, 1))
    other[0] |= {name: first[0][name] for name in ("input_ids", "labels")}
    reader = image_reader(text_part(model))
    assert RowBatch(first, reader=reader).identity != RowBatch(other, reader=reader).identity
    with Session(model, SGD(model.parameters()), capacity_tokens=64) as session:
        assert session.backward(first).loss != session.backward(other).loss
    assert [name for name, each in model.model.visual.named_parameters() if each.grad is not None] == []


def test_images_that_do_not_fit_their_row_or_model_are_named():
    model = image_model("qwen3_vl", torch.float32)
    model.config.video_token_id = video = IMAGE + 1
    rows = image_rows(model, [[2, (4, 4), 3]])

    def said(session, **changes):
        row = {name: each for name, each in {**rows[0], **changes}.items() if each is not None}
        with pytest.raises(LengthwiseError) as raised:
            session.backward([row])
        return str(raised.value)

    ids, grids = rows[0]["input_ids"], rows[0]["image_grid_thw"]
    with Session(model, SGD(model.parameters()), capacity_tokens=64) as session:
        assert "pixel_values, image_grid_thw beside 4 tokens of images; got no image_grid_thw" in said(
            session, image_grid_thw=None
        )
        assert f"got no token {IMAGE}" in said(session, input_ids=torch.where(ids == IMAGE, 1, ids))
        wider = grids + torch.tensor([0, 0, 2])
        assert "for 1 image; got 6 tokens and 24 entries" in said(session, image_grid_thw=wider)
        of_video = torch.where(ids == IMAGE, video, ids)
        assert f"got the token {video}, which stands for an image or a sound (video_token_id)" in said(
            session, input_ids=of_video
        )
    config = tiny_tower_config("gemma3", "gemma3_text", {"vocab_size": VOCAB}, image_token_index=IMAGE)
    blind = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").train()
    with Session(blind, SGD(blind.parameters()), capacity_tokens=64) as session:
        assert f"got the token {IMAGE}, which stands for an image" in said(session)
        assert "sequence 0, images: expected a row of text, for this model and layout" in said(
            session, input_ids=torch.where(ids == IMAGE, 1, ids)
        )
