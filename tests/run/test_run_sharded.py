"""`shard: zero3`, `stages` and models with towers: what ranks read and hold of the weights; verify.

That a text part trains and the whole is saved: tests/doors/test_doors_families.py.
"""

import json
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from testing import run_ranks, tiny_family_config
from testing.laid import freed_parameters
from testing.small import VOCAB, make_rows, write_model
from testing.towers import tiny_tower_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lengthwise.models import build_model, find_model, left_alone, wrapped_layers
from lengthwise.models.own_rows import OwnRows, own_rows
from lengthwise.run import building, setup
from run.small_runs import call, losses, told, train, write_run
from tiers import more

CPU = torch.device("cpu")
LENGTHS = [37, 11, 5, 7, 2, 90, 64, 33, 12, 8, 9, 23]


def run_file(folder, **keys):
    keys = {"precision": "fp64", "capacity_tokens": 48, "steps": 3, "global_batch": {"sequences": 6}, **keys}
    return write_run(folder, make_rows(LENGTHS), **keys)


def saved_model(folder, family, **changes):
    """Save a model of random weights in several files, tied names once, as the hub has them."""
    config = tiny_family_config(family, changes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1MB")
    return sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("family", ["llama", more("gemma3_text")])
def test_ranks_read_their_own_rows_of_what_transformers_would_load(tmp_path, family):
    num_bytes = saved_model(tmp_path, family, vocab_size=4096, hidden_size=128, tie_word_embeddings=family != "llama")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or family != "llama"
    source = find_model(str(tmp_path))
    expected = {name: each.detach() for name, each in build_model(source, seed=0).named_parameters()}

    def work(transport):
        model = build_model(source, seed=0, stored=False)
        rows = own_rows(source, model)
        layers = wrapped_layers(model)
        parameters = freed_parameters(model, transport, dtype=torch.float32, device=CPU, layers=layers, read=rows.read)
        with parameters.whole_on_first(trained_only=False):
            whole = {name: each.detach() for name, each in model.named_parameters()} if not transport.rank else {}
            assert all(torch.equal(each, expected[name]) for name, each in whole.items())
            return rows.num_bytes, len(whole)

    found = run_ranks(work, 3)
    assert found[0][1] == len(expected)
    assert sum(read for read, _ in found) == num_bytes
    assert max(read for read, _ in found) <= num_bytes / 3 * 1.02


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), data=st.data())
def test_entries_of_a_tensor_are_read_alone(shape, data, tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("weights"), torch.randn(shape)
    first, stop = sorted(data.draw(st.lists(st.integers(0, whole.numel()), min_size=2, max_size=2)))
    save_file({"weight": whole}, folder / "model.safetensors")
    rows = OwnRows(folder)
    assert torch.equal(rows.read("weight", first, stop), whole.view(-1)[first:stop])
    assert rows.num_bytes == 4 * (stop - first)


@pytest.mark.exhaustive
def test_what_is_not_there_one_by_one_is_read_by_rank_0(tmp_path):
    saved_model(tmp_path / "model", "qwen3_moe", vocab_size=64)
    source = find_model(str(tmp_path / "model"))
    assert own_rows(source, build_model(source, seed=0, stored=False)) is None
    path = run_file(tmp_path, model=str(tmp_path / "model"), precision="fp32", capacity_tokens=96, steps=1)
    expected = losses(train(path))
    found = losses(train(path, "--ranks", 2, "--overwrite", "--set", "shard=zero3"))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_no_rank_holds_the_whole_model_at_the_start(tmp_path):
    """By the peak of a process's own memory: what it has mapped of files is the system's."""
    num_bytes = 2 * saved_model(tmp_path, "llama", vocab_size=16384, hidden_size=512, num_hidden_layers=6)  # in fp32
    source = find_model(str(tmp_path))

    def work(transport):
        before = own_bytes()
        model = build_model(source, seed=0, stored=False)
        layers, rows = wrapped_layers(model), own_rows(source, model)
        freed_parameters(model, transport, dtype=torch.float32, device=CPU, layers=layers, read=rows.read)
        return own_bytes() - before

    took = max(run_ranks(work, 4))
    assert took < 0.9 * num_bytes, "masters and gradients are two quarters; the rest is one unit, gathered and summed"


def own_bytes():
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_verify_compares_stages_with_one_process(tmp_path, capsys):
    """By the plan that `plan` writes."""
    model = write_model(tmp_path / "model", num_hidden_layers=3, tie_word_embeddings=True)
    path, plan = run_file(tmp_path, model=str(model), stages=2, device="cpu"), tmp_path / "plan.json"
    assert call("plan", "--config", path, "--out", plan, "--ranks", 5) == 2
    assert call("plan", "--config", path, "--out", plan, "--ranks", 4) == 0
    said = " ".join(told(capsys, "verify", path, "--ranks", 4, "--plan", plan).split())
    assert "stages: 2 with 2 ranks a stage, of layers 0 to 1 | 2" in said
    assert "exercised: rings of 2 ranks" in said
    assert "PASS" in said


OF_TEXT = [30, 1, 12, 5, 61, 2, 9, 40]
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
    path = write_run(tmp_path, make_rows(OF_TEXT), model=write_whole(tmp_path / "model"), capacity_tokens=64, steps=1)
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
    output = train(write_run(tmp_path, make_rows(OF_TEXT), capacity_tokens=64, **keys))
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
