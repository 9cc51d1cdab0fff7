"""Rows with images train as in plain Hugging Face: cut through images, packed with rows of text, over any ranks."""

import copy
import warnings
from functools import partial

import pytest
import torch
from loops import both_loops, in_double, in_ranks, said
from peft import LoraConfig, get_peft_model
from testing.images import IMAGE, SPECS, TEXTS, image_model, image_rows
from testing.small import VOCAB
from testing.towers import tiny_tower_config
from transformers import AutoModelForImageTextToText

from lengthwise import LengthwiseError, Session
from lengthwise.engine.byte_watch import LiveBytes
from lengthwise.models import IMAGE_FAMILIES, image_reader, text_part
from lengthwise.session import engine
from lengthwise.session.row_batch import RowBatch
from tiers import more, some

SGD = partial(torch.optim.SGD, lr=0.05)
LAYOUTS = [{"shard": "zero1"}, {"shard": "zero3", "recompute": "layer"}]


def in_chunks(words, **_):
    """Let a chunk of the loss have 8 tokens."""
    return 8 * words


def test_every_family_that_sees_is_tried():
    assert set(IMAGE_FAMILIES) == set(TEXTS)


@pytest.mark.parametrize(
    ("family", "ranks", "trains"),
    [
        *(("qwen3_vl", 3, "text"), ("gemma3", 2, "all")),
        *(more(family, ranks, trains) for family in TEXTS for ranks in (1, 2, 3, 4) for trains in ("text", "all")),
    ],
)
def test_rows_with_images_train_as_in_the_plain_loop(family, ranks, trains, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "logits_at_once", in_chunks)

    def work(_rank):
        found = []
        for layout in LAYOUTS:
            model = image_model(family)
            if trains == "all":
                model.requires_grad_(True)
            steps = [image_rows(model), image_rows(model, SPECS[2:], seed=1)]
            found.append(both_loops(SGD, model=model, steps=steps, capacity=24 if ranks > 1 else 100, **layout))
        assert max(map(max, found)) < 1e-11

    in_ranks(in_double(work), ranks, tmp_path)


def answers(model, spec, count=8):
    """Return answers of 6 tokens to one text about two images, or two lists of them."""
    for number in range(count):
        (row,) = image_rows(model, [spec], seed=2 * number // count)
        ids = image_rows(model, [spec])[0]["input_ids"]
        ids[-6:] = torch.randint(1, 50, (6,), generator=torch.Generator().manual_seed(number))
        labels = torch.where(torch.arange(len(ids)) < len(ids) - 6, -100, ids)
        yield {**row, "input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("family", "spec", "prefixes"),
    [("qwen3_vl", [3, (8, 8), 40], 2), more("gemma3", [20, (4, 4), 40], 2), more("gemma3", [90, (4, 4), 6], 1)],
)
def test_answers_about_an_image_share_its_tokens_and_adapters_train(family, spec, prefixes, tmp_path):
    """Answers about another image of the same size share nothing with them but what comes before it."""

    def work(_rank):
        model = image_model(family)
        torch.manual_seed(2)
        config = LoraConfig(r=4, target_modules=r".*(language_model.*q_proj|visual.*qkv)", init_lora_weights=False)
        with warnings.catch_warnings(action="ignore"):  # peft reads a deprecated attribute
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        steps = [list(answers(model, spec))]
        with Session(copy.deepcopy(adapted), capacity_tokens=600, shard="zero1") as session:
            beginnings = len(session.evaluate(steps[0]).plan.tokens) - len(steps[0])
        return beginnings, both_loops(SGD, model=adapted, steps=steps, capacity=600, shard="zero1")

    for beginnings, found in in_ranks(in_double(work), 2, tmp_path):
        assert beginnings == prefixes
        assert max(found) < 1e-11


@pytest.mark.parametrize(("family", "common"), [("gemma3", 20), ("mistral3", 20 + 4 + 1)])
def test_a_prefix_ends_before_images_that_see_each_other_if_one_differs(family, common):
    """They touch in Gemma 3, where the tokens of the first depend on the second; text parts them in others."""
    model = image_model(family)
    rows = [image_rows(model, [[20, (4, 4), (4, 4), 9]])[0] for _ in range(2)]
    rows[1]["pixel_values"] = rows[1]["pixel_values"].clone()
    rows[1]["pixel_values"][1] += 1
    for row in rows:
        row["labels"] = row["labels"].clone()
        row["labels"][:-6] = -100
    shared = RowBatch(rows, reader=image_reader(text_part(model))).shared_prefixes()
    assert shared is not None
    assert shared.common == (0, common)


ALONE = [[5, (4, 4), 50], [2, (4, 6), 30], [1, (8, 8), 3]]
TEXT = [[3], [7], [30]]


def test_a_tower_trains_beside_a_frozen_decoder_and_rows_of_text_leave_it(tmp_path, capfd, monkeypatch):
    """Layers run backward on ranks without images, too; a tower without a gradient does not decay, as in torch."""
    monkeypatch.setattr(engine, "logits_at_once", in_chunks)
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)

    def work(_rank):
        alone, text = image_model("qwen3_vl").requires_grad_(False), image_model("qwen3_vl").requires_grad_(True)
        tower, runs = alone.model.visual.requires_grad_(True), []
        before, left = copy.deepcopy(tower.state_dict()), copy.deepcopy(text.model.visual.state_dict())
        first = tower.blocks[0].norm1
        first.register_forward_pre_hook(lambda module, *_: runs.append(module is first))
        how = {"capacity": 24, "shard": "zero1"}
        found = [both_loops(adamw, model=alone, steps=[image_rows(alone, ALONE)], recompute="layer", **how)]
        found.append(both_loops(adamw, model=text, steps=[image_rows(text, TEXT)], **how))
        assert max(map(max, found)) < 1e-11
        assert not any(torch.equal(each, before[name]) for name, each in tower.state_dict().items())
        assert all(torch.equal(each, left[name]) for name, each in text.model.visual.state_dict().items())
        return sum(runs)

    runs = in_ranks(in_double(work), 3, tmp_path)
    assert set(runs) == {0, 2, 4}, "images in no, one or two microbatches of a rank; blocks run again in backward"
    number = sum(each.numel() for each in image_model("qwen3_vl").model.visual.parameters())
    assert f"{number:,} parameters of model.visual train by rows with images" in capfd.readouterr().out


@pytest.mark.parametrize("family", some(TEXTS, 2))
def test_what_a_tower_that_trains_holds_is_predicted_at_the_start(family):
    """Within 3 %, but for scans, of which the least whole chunks are counted."""
    model = image_model(family, torch.float32).requires_grad_(True)
    (row,) = image_rows(model, [[(16, 16)]])
    row |= {"labels": row["input_ids"], "pixel_values": row["pixel_values"].float()}
    with Session(model, SGD(model.parameters()), capacity_tokens="auto", recompute="none") as session:
        for _ in range(2):  # the first makes gradients
            session.optimizer.zero_grad(set_to_none=False)
            with LiveBytes(*model.parameters(), *model.buffers(), *session.engine.parameters.tensors()) as live:
                session.backward([row])
        memory = session.planning.ahead.measured.memory
        ratio = memory.peak_bytes("none", len(row["input_ids"])) / live.peak_bytes
    assert 0.97 < ratio < (1.5 if "qwen3_5" in family else 1.1)


def test_a_tower_that_masks_all_pairs_of_patches_runs_image_by_image(tmp_path):
    """Else its memory grows with the square of all images of a microbatch; one may have a single token."""
    how = {"steps": [image_rows(image_model("mistral3"), [[2, (4, 4), 3, (2, 2), 3]])], "capacity": 24}
    work = lambda _rank: both_loops(SGD, model=image_model("mistral3").requires_grad_(True), **how)  # noqa: E731
    assert max(map(max, in_ranks(in_double(work), 1, tmp_path))) < 1e-11
    model, runs = image_model("mistral3", torch.float32), []
    model.model.vision_tower.register_forward_hook(lambda *_: runs.append(1))
    with Session(model, SGD(model.parameters()), capacity_tokens=100) as session:
        session.backward(image_rows(model, [[2, (4, 4), 3, (4, 6), 3], [1, (2, 4), 5]]))
    assert len(runs) == 3


def test_tiles_of_another_size_have_the_tokens_that_the_tower_makes(tmp_path):
    """InternVL's tower adapts its positions; rows whose tokens do not fit are refused, as in Hugging Face."""
    model = image_model("internvl")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([7, *[IMAGE] * 32, 3, 9, 2])
    row = {"input_ids": ids, "labels": torch.where(ids == IMAGE, -100, ids), "pixel_values": pixels}
    work = lambda _rank: both_loops(SGD, model=image_model("internvl"), steps=[[row]], capacity=24)  # noqa: E731
    assert max(map(max, in_ranks(in_double(work), 2, tmp_path))) < 1e-11
    with pytest.raises(LengthwiseError, match="8 tokens for 2 images; got 32 tokens by pixel_values"):
        image_reader(text_part(model)).read(ids.numpy()[25:], {"pixel_values": pixels}, "row 1")
    of_files = image_reader(text_part(model)).read_files(ids.numpy()[25:], [((2, 4), 8)], lambda _: row, "row 1")
    with pytest.raises(LengthwiseError, match="32 tokens of an image, as the model makes; got 8 by"):
        of_files.inputs(0)


def test_a_tower_that_no_optimizer_has_gets_no_gradients_and_other_images_make_other_steps():
    """Ranks compare what they were given before they run it."""
    model = image_model("qwen3_vl", torch.float32)
    own = list(filter(lambda each: each.requires_grad, model.parameters()))
    model.model.visual.requires_grad_(True)
    first, other = (image_rows(model, [[2, (4, 4), 3]], seed=seed) for seed in (0, 1))
    other[0] |= {name: first[0][name] for name in ("input_ids", "labels")}
    model.config.vision_config.attention_dropout = 0.1
    told = said(lambda: Session(model, SGD(model.parameters()), capacity_tokens=64))
    assert "without dropout in its attention; got attention_dropout 0.1" in told
    reader = image_reader(text_part(model))
    assert RowBatch(first, reader=reader).identity != RowBatch(other, reader=reader).identity
    with Session(model, SGD(own), capacity_tokens=64) as session:
        assert session.backward(first).loss != session.backward(other).loss
        (planned,) = session.batches([first])
        assert planned.plan.images[0].total > 0, "plans count the tower's work"
    assert [name for name, each in model.model.visual.named_parameters() if each.grad is not None] == []


def changed(row, name, change):
    """Return the row with another column; None: without it."""
    others = {key: each for key, each in row.items() if key != name}
    return others if change is None else {**others, name: change(row[name])}


VIDEO = IMAGE + 1
WRONG_ROWS = [
    ("image_grid_thw", None, "beside 4 tokens of images; got no image_grid_thw"),
    ("input_ids", lambda ids: torch.where(ids == IMAGE, 1, ids), f"got no token {IMAGE}"),
    ("image_grid_thw", lambda grids: grids + torch.tensor([0, 0, 2]), "16 entries of pixel_values for 1 image; got 24"),
    ("image_grid_thw", lambda grids: grids.double(), "sequence 0, images: expected"),
    ("image_grid_thw", lambda grids: -grids, "sequence 0, images: expected"),
    ("image_grid_thw", lambda grids: grids + torch.tensor([0, 1, -1]), "sequence 0, images: expected"),
    ("pixel_values", lambda values: values[:, 1:], "got pixel_values of torch.float64 (16, 95)"),
    ("input_ids", lambda ids: torch.where(ids == IMAGE, VIDEO, ids), f"got the token {VIDEO}, which stands for an"),
]


def test_images_that_do_not_fit_their_row_or_model_are_named():
    model = image_model("qwen3_vl", torch.float32)
    model.config.video_token_id = VIDEO
    (row,) = image_rows(model, [[2, (4, 4), 3]])
    with Session(model, SGD(model.parameters()), capacity_tokens=64) as session:
        for name, change, words in WRONG_ROWS:
            assert words in said(partial(session.backward, [changed(row, name, change)]))
        with_videos = {**row, "pixel_values_videos": row["image_grid_thw"]}
        assert "expected text or images; got videos" in said(lambda: session.backward([with_videos]))
    config = tiny_tower_config("llava", "llama", {"vocab_size": VOCAB}, image_token_index=IMAGE)
    blind = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").train()
    with Session(blind, SGD(blind.parameters()), capacity_tokens=64) as session:
        assert f"got the token {IMAGE}, which stands for an image" in said(lambda: session.backward([row]))
        of_text = changed(row, "input_ids", WRONG_ROWS[1][1])
        assert "expected a row of text, for this model and layout" in said(lambda: session.backward([of_text]))
