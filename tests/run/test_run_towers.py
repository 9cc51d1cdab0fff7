"""A run file whose model has towers: what a rank reads of them, adapters, images of a model that sees none.

That the text part trains and the whole is saved: tests/doors/test_doors_families.py.
"""

import json

import peft
import pytest
import torch
from testing.small import VOCAB, make_rows
from testing.towers import tiny_tower_config
from transformers import AutoModelForImageTextToText

from lengthwise.models import build_model, find_model, left_alone
from lengthwise.models.own_rows import own_rows
from lengthwise.run import building, setup
from run.small_runs import call, train, write_run
from tiers import more

LENGTHS = [30, 1, 12, 5, 61, 2, 9, 40]
IMAGE = 3


def write_whole(folder, whole="gemma3", text="gemma3_text", **others):
    torch.manual_seed(0)
    config = tiny_tower_config(whole, text, {"vocab_size": VOCAB}, **others)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 16}', encoding="utf-8")
    return folder


def opened(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["stages=2", "shard=zero3"])
def test_rank_0_alone_holds_towers_and_the_processor_is_saved(tmp_path, layout, capfd, monkeypatch):
    made = building.open_session

    def opened_session(job, world, transport, *arguments, **options):
        session = made(job, world, transport, *arguments, **options)
        places = {each.is_meta for each in left_alone(session.engine.model).values()}
        assert places == {transport.rank > 0}, f"rank {transport.rank}: towers on meta: {places}"
        return session

    monkeypatch.setattr(setup, "open_session", opened_session)
    path = write_run(tmp_path, make_rows(LENGTHS), model=write_whole(tmp_path / "model"), capacity_tokens=64, steps=1)
    output = train(path, "--ranks", 2, "--set", layout)
    assert "ForConditionalGeneration: its text part trains" in capfd.readouterr().out
    assert json.loads((output / "model/preprocessor_config.json").read_text()) == {"size": 16}


def test_towers_are_read_from_the_files_by_name(tmp_path):
    source = find_model(str(write_whole(tmp_path, "qwen3_vl", "qwen3_vl_text")))
    expected, model = build_model(source, seed=0), build_model(source, seed=0, stored=False)
    rows = own_rows(source, model)
    rows.read_towers(model)
    found, towers = left_alone(model), left_alone(expected)
    assert found.keys() == towers.keys()
    assert all(torch.equal(found[name], each) for name, each in towers.items())
    assert rows.num_bytes == sum(each.nbytes for each in towers.values())
    assert all(each.is_meta for each in model.parameters())


@pytest.mark.exhaustive
def test_adapters_are_on_the_text_part_alone_and_open_on_the_whole(tmp_path):
    folder = write_whole(tmp_path / "model")
    keys = {"lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]}, "optimizer": {"lr": 0.02}, "model": folder}
    output = train(write_run(tmp_path, make_rows(LENGTHS), capacity_tokens=64, **keys))
    adapted = peft.PeftModel.from_pretrained(opened(folder), output / "model")
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(names) == 2 * 2 * 2
    assert all(".language_model.layers." in name for name in names)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (adapted(ids).logits - opened(folder)(ids).logits).norm() > 1e-3


@pytest.mark.parametrize("how", [more("verify"), "by the second rank", more("as a stream")])
def test_rows_with_images_are_refused(tmp_path, how, capfd):
    """On whichever rank, from whatever source: the token is in the half of a row that rank 1 has."""
    text, image = [{"input_ids": [1, 2, 4]} for _ in range(4)], [{"input_ids": [*[4, 5] * 13, IMAGE, *[4, 5] * 7]}]
    streamed = {"streaming": True, "max_tokens": 60} if how == "as a stream" else {}
    keys = {"data": [{"path": "train.jsonl", **streamed}]}
    model = write_whole(tmp_path / "model", image_token_index=IMAGE)
    path = write_run(tmp_path, text + image, model=model, global_batch={"sequences": 5}, steps=1, **keys)
    assert call("verify" if how == "verify" else "train", path, "--ranks", 2) != 0
    said = " ".join(capfd.readouterr().err.split())
    assert f"train.jsonl:5: expected tokens of text; got the token {IMAGE}, which stands for an image" in said
