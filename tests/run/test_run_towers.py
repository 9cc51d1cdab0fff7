"""A run file whose model has towers: its text part trains, all of it is saved, and rows with images are refused."""

import json

import peft
import pytest
import torch
from testing.small import DTYPES, VOCAB, make_rows, plain_training, relative
from testing.towers import tiny_tower_config
from transformers import AutoModelForImageTextToText

from lengthwise.models import build_model, find_model, left_alone
from lengthwise.models.own_rows import own_rows
from lengthwise.run import building, setup
from run.small_runs import call, losses, steps_of, train, write_rows, write_run
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


STAGES = ["stages=2", "capacity_tokens=64"]
QWEN = "qwen3_vl", "qwen3_vl_text"


@pytest.fixture
def towers_on_rank_0(monkeypatch):
    """Let a rank that holds a tower and is not the first end in an error."""
    made = building.open_session

    def opened_session(job, world, transport, *arguments, **options):
        session = made(job, world, transport, *arguments, **options)
        places = {each.is_meta for each in left_alone(session.engine.model).values()}
        assert places == {transport.rank > 0}, f"rank {transport.rank}: towers on meta: {places}"
        return session

    monkeypatch.setattr(setup, "open_session", opened_session)


@pytest.mark.usefixtures("towers_on_rank_0")
@pytest.mark.parametrize(
    ("options", "model"),
    [(STAGES, ()), more([], ()), more(STAGES, QWEN), *(more(["shard=zero3"], each) for each in ((), QWEN))],
)
def test_a_run_trains_the_text_part_and_saves_the_whole(tmp_path, options, model, capfd):
    folder = write_whole(tmp_path / "model", *model)
    changes = [part for each in options for part in ("--set", each)]
    output = train(write_run(tmp_path, make_rows(LENGTHS), model=folder), "--ranks", 2, *changes)
    said = "ForConditionalGeneration: rows of text train its text part"
    assert said in capfd.readouterr().out
    expected, _, plain = plain_training(
        opened(folder), make_rows(LENGTHS), steps_of(output), dtype=DTYPES["fp64"], lrs=[3e-4] * 3
    )
    assert all(relative(got, wanted) < 1e-7 for got, wanted in zip(losses(output), expected, strict=True))
    saved, before = opened(output / "model"), opened(folder).state_dict()
    assert type(saved) is type(plain)
    own, reference = saved.state_dict(), plain.state_dict()
    assert own.keys() == reference.keys()
    assert max((own[name] - each).norm() / each.norm() for name, each in reference.items()) < 1e-6
    towers = [name for name in own if not name.startswith(("model.language_model.", "lm_head."))]
    assert len(towers) > 10
    assert all(torch.equal(own[name], before[name]) for name in towers)
    assert json.loads((output / "model/preprocessor_config.json").read_text()) == {"size": 16}


def test_towers_are_read_from_the_files_by_name(tmp_path):
    source = find_model(str(write_whole(tmp_path, *QWEN)))
    expected, model = build_model(source, seed=0), build_model(source, seed=0, stored=False)
    rows = own_rows(source, model)
    rows.read_towers(model)
    found, towers = left_alone(model), left_alone(expected)
    assert found.keys() == towers.keys()
    assert all(torch.equal(found[name], each) for name, each in towers.items())
    assert rows.num_bytes == sum(each.nbytes for each in towers.values())
    assert all(each.is_meta for each in model.parameters())


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
    keys["lora"] = {"adapter": "out/model"}
    train(write_run(tmp_path, **keys, capacity_tokens=64, steps=1, output="more", name="more.yaml"))
    assert losses(tmp_path / "more")[0] < losses(output)[0]


READ_ON = {"by the second rank": {}, "as a stream": {"streaming": True, "max_tokens": 60}}


@pytest.mark.parametrize("how", ["verify", "by the second rank", *map(more, ("as a stream", "prepared", "evaluated"))])
def test_rows_with_images_are_refused(tmp_path, how, capfd):
    """On whichever rank, from whatever source: the token is in the half of a row that rank 1 has."""
    text, image = [{"input_ids": [1, 2, 4]} for _ in range(4)], [{"input_ids": [*[4, 5] * 13, IMAGE, *[4, 5] * 7]}]
    file, keys = "train.jsonl", {"data": [{"path": "train.jsonl", **READ_ON.get(how, {})}]}
    if how == "evaluated":
        file, keys = "eval.jsonl", {"eval": {"data": [{"path": "eval.jsonl"}], "every_steps": 1}}
        write_rows(tmp_path / file, text + image)
    path = write_run(
        tmp_path,
        text if how == "evaluated" else text + image,
        model=write_whole(tmp_path / "model", image_token_index=IMAGE),
        global_batch={"sequences": 4 if how == "evaluated" else 5},
        steps=1,
        **keys,
    )
    if how == "prepared":
        assert call("prepare", path, "--out", tmp_path / "ready") == 0
        path = write_run(tmp_path, model=tmp_path / "model", data=[{"path": "ready"}], steps=1, name="again.yaml")
    assert call("verify" if how == "verify" else "train", path, "--ranks", 2) != 0
    said = " ".join(capfd.readouterr().err.split())
    assert f"{file}:5: expected tokens of text; got the token {IMAGE}, which stands for an image" in said
