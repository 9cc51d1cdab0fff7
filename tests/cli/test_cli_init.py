"""`lengthwise init`: a run file that loads and trains, with what fits; what cannot be is refused, all at once."""

import json
import re

import pytest
from testing.small import make_rows, write_model

from lengthwise.config import load_config
from run.small_runs import call, losses, told, write_rows


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def rows(path, number=40):
    return write_rows(path, [{"text": "x" * (n + 1)} for n in range(number)])


def test_the_whole_model_where_it_fits_else_adapters_else_in_4_bits(tmp_path, capsys):
    data = rows(tmp_path / "deep rows.jsonl")
    asked = [
        ("Qwen/Qwen3-8B", 8, False, 1e-5, None),
        ("llama-3.1-70b", 1, True, 2e-4, "nf4"),
        ("meta-llama/Llama-3.1-8B-Instruct", 1, True, 2e-4, None),
    ]
    for model, gpus, adapters, rate, quantization in asked:
        said = told(capsys, "init", "--model", model, "--gpus", gpus, "--data", data, "--out", "run.yaml", "--force")
        assert f"on {gpus} x h100" in said
        config = load_config(tmp_path / "run.yaml", [])
        assert (config.model, config.data[0].path, config.precision) == (model, data, "auto")
        assert (config.lora is not None, config.quantization) == (adapters, quantization)
        assert config.optimizer.lr == rate
    assert max(map(len, (tmp_path / "run.yaml").read_text().splitlines())) <= 120


def test_what_it_says_in_comments_loads_too(tmp_path):
    assert call("init", "--model", "qwen3-8b", "--gpus", 8, "--data", rows(tmp_path / "rows.jsonl")) == 0
    rows(tmp_path / "held-out.jsonl")
    path = tmp_path / "run.yaml"
    path.write_text(re.sub(r"^# (?=[a-z_]+: )", "", path.read_text(), flags=re.MULTILINE))
    assert load_config(path).eval


def test_the_file_trains(tmp_path):
    model = write_model(tmp_path / "model", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    data = write_rows(tmp_path / "rows.jsonl", make_rows([30, 12, 5, 60]))
    assert call("init", "--model", model, "--gpus", 2, "--hardware", "cpu", "--data", data, "--out", "my.yaml") == 0
    assert call("train", tmp_path / "my.yaml", "--set", "steps=1", "epochs=null") == 0
    assert len(losses(tmp_path / "runs" / "my")) == 1


def test_too_little_memory_names_how_many_gpus_are_enough_and_where_none_is_the_model_is_sharded(tmp_path, capsys):
    asked = ("init", "--data", write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1] * 400_000}]), "--force")
    small, large = ((*asked, "--model", model, "--gpus") for model in ("qwen3-14b", "llama-3.1-70b"))
    enough = re.search(r"(\d+) of them are enough", " ".join(told(capsys, *small, 1, status=2).split()))
    assert not (tmp_path / "run.yaml").exists()
    told(capsys, *small, enough[1])
    told(capsys, *large, 64)
    text = (tmp_path / "run.yaml").read_text()
    assert "# shard: auto  # by estimate zero3" in text
    assert "lora" not in text
    assert "under shard: zero3" in " ".join(told(capsys, *large, 1, status=2).split())


def test_what_chats_need_beside_tokens_is_not_counted_and_said(tmp_path, capsys):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}])
    told(capsys, "init", "--model", "qwen3-8b", "--gpus", 8, "--data", data)
    assert "Not counted: " in (tmp_path / "run.yaml").read_text()


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "head_dim": 16, "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
UNTRAINED = {
    "linear": ({**SIZES, "model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layers of linear_attention"),
    "images": (
        {"model_type": "paligemma", "text_config": {**SIZES, "model_type": "gemma"}, "vision_config": {}},
        "paligemma, a model of more than text (vision_config), whose text part is gemma",
    ),
}


@pytest.mark.parametrize("case", UNTRAINED)
def test_a_family_that_is_not_trained_is_named_by_each_verb(tmp_path, capsys, case):
    values, expected = UNTRAINED[case]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(values))
    data = rows(tmp_path / "rows.jsonl")
    run = {"model": "./model", "data": [{"path": "rows.jsonl"}], "tokenizer": "bytes", "output": "out"}
    (tmp_path / "my.yaml").write_text(json.dumps(run))
    asked = ("--gpus", 1, "--lengths", "github", "--batches", 1, "--batch-tokens", "4K", "--context", "1K")
    for command in (
        ("init", "--model", "./model", "--data", data),
        ("plan", "--config", "my.yaml", "--ranks", 2, "--capacity", "8K", "--out", "plan.json"),
        ("simulate", "--model", "./model", *asked),
    ):
        if command[0] == "simulate" and case == "images":
            said = " ".join(told(capsys, *command).split())
            assert "Only the text part is priced: ./model is paligemma" in said
            continue
        said = told(capsys, *command, status=2)
        assert said.startswith("error[model]")
        assert said.count("\n") == 1, "one line"
        assert expected in said
        assert "plain TRL" in said
    assert not (tmp_path / "run.yaml").exists()
