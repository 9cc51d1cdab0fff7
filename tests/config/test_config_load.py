"""The run file as a user writes it: defaults, strict types, all problems at once, paths, the way back to YAML."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lengthwise.config import GlobalBatch, RunConfig, build_config, dump_config, load_config
from lengthwise.config.optimizer_config import OPTIMIZERS
from lengthwise.config.problems import _OTHER_KEYS, sections_of
from lengthwise.config.run_file import apply_overrides
from lengthwise.core.errors import ConfigError, LengthwiseError, Problems

STREAM = "path: train.jsonl, streaming: true, max_tokens: 9"
REMOTE = "path: train.jsonl, remote: true, max_tokens: 9"
MINIMAL = "model: tiny\ndata: [{path: train.jsonl}]\noutput: runs/first\n"
LISTING = """
model: tiny
data: [{path: train.jsonl, max_tokens: null, too_long: error}]
eval: {data: [{path: train.jsonl}], every_steps: 50}
tokenizer: bytes
seed: 0
steps: 100
global_batch: {sequences: 64}
capacity_tokens: auto
recompute: auto
heads: auto
loss: chunked
planner: lengthwise
precision: auto
optimizer: {name: adamw, lr: null, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, max_grad_norm: 1.0, schedule: null, warmup_steps: null}
output: runs/first
"""  # noqa: E501 - as the documentation has it


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def problems_of(path, overrides=()):
    with pytest.raises(LengthwiseError) as caught:
        load_config(path, overrides)
    error = caught.value
    assert error.exit_status == 2
    found = error.problems if isinstance(error, Problems) else (error,)
    assert all(isinstance(problem, ConfigError) and "\n" not in str(problem) for problem in found)
    return {problem.where: str(problem) for problem in found}


def test_config_minimal_file_gets_the_defaults_of_the_listing_which_is_read_back(folder, tmp_path_factory):
    minimal = load_config(write(folder, MINIMAL))
    listed = load_config(write(folder, LISTING))
    assert minimal == listed.model_copy(update={"eval": None, "tokenizer": None})
    assert (minimal.steps, minimal.epochs, minimal.global_batch) == (100, None, GlobalBatch(sequences=64))
    assert (minimal.optimizer.betas, minimal.optimizer.eps) == ((0.9, 0.95), 1e-8)
    elsewhere = write(tmp_path_factory.mktemp("elsewhere"), dump_config(listed))
    assert load_config(elsewhere) == listed
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        if not field.is_required() and name not in ("optimizer", "epochs"):
            assert "default" in field.description, name


def test_config_defaults_that_depend_on_other_keys(folder):
    path = write(folder, MINIMAL)
    (folder / "tiny").mkdir()  # the built-in model all the same
    assert (load_config(path).model, load_config(path).tokenizer_name) == ("tiny", "bytes")
    assert load_config(path, ["model=org/name"]).tokenizer_name == "org/name"
    assert load_config(path, ["model=org/name", "tokenizer=bytes"]).tokenizer_name == "bytes"
    assert (load_config(path, ["epochs=2"]).steps, load_config(path, ["epochs=2"]).epochs) == (None, 2)
    sources = load_config(path, ["data=[{path: train.jsonl}, {python_stdlib: true}]"]).data
    assert [source.empty for source in sources] == ["error", "skip"]


def test_config_each_optimizer_has_its_own_defaults_and_is_read_back(folder):
    for name, defaults in OPTIMIZERS.items():
        config = load_config(write(folder, MINIMAL + f"optimizer: {{name: {name}}}\n"))
        wanted = {**defaults, "name": name}
        assert {key: value for key, value in config.optimizer.model_dump().items() if key in wanted} == wanted
        assert load_config(write(folder, dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "where", "expected"),
    [
        ("steps='3'", "steps", "'3' (text) -> a whole number"),
        ("steps=0", "steps", "0 (a whole number) -> at least 1"),
        ("seed=9223372036854775808", "seed", "-> less than"),
        ("optimizer.lr=.nan", "optimizer.lr", "-> a finite number"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1", "less than 1"),
        ("optimizer.name=adamx", "optimizer.name", "-> `adam`, of "),
        ("optimizer.name=muon", "optimizer.name", "depends on the whole matrix"),
        ("optimizer.name=rmsprop", "optimizer.name", "A `Session` takes torch's own"),
        ("optimizer.schedule=greedy", "optimizer.schedule", "follows an evaluation's loss"),
        ("optimizer.schedule=cosine_with_min_lr", "optimizer.schedule_args", "got neither"),
        ("optimizer.schedule_args={power: 2}", "optimizer.schedule_args.power", "it belongs to polynomial"),
        ("optimizer={schedule: polynomial, lr: 1e-8}", "optimizer.schedule_args.lr_end", "less than lr, 1e-08"),
        ("lora.rank=8", "lora.rank", "-> one of adapter, lora_alpha"),
        ("precision=fp16", "precision", "-> bf16: fp16 needs a loss scale"),
        ("output=s3://bucket/run", "output", "s3:// is not written yet"),
        ("data={path: train.jsonl}", "data", "-> a list: a list of sources"),
        ("data.0.path=~nobody-of-this-name/x", "data.0.path", "an existing file or folder"),
        ("measurements=on", "measurements", "auto, off or an existing file"),
        ("offload=0.5", "offload", "-> a mapping of keys: {store: disk"),
        ("capacity_tokens=8Q", "capacity_tokens", "'8Q' (text) -> auto or a whole number"),
        ("offload={ratio: 1.5}", "offload.ratio", "1.5 (a number) -> auto or off or at most 1"),
        ("steeps=3", "steeps", "`steps`"),
        ("seed", "overrides seed", "expected key=value"),
        ("a..b=5", "overrides a..b=5", "expected key=value"),
        ("model.x=5", "overrides model.x", "keys in `model`"),
        ("data.1.path=x", "overrides data.1", "an index from 0 to 0"),
        ("data.-1.path=x", "overrides data.-1", "an index from 0 to 0"),
        ("data.first.path=x", "overrides data.first", "an index from 0 to 0"),
        ("seed=[1", "overrides seed=[1:1", "YAML"),
        ("lora={r: 1, r: 2}", "overrides lora={r: 1, r: 2}:1", "every key once"),
        ("learning_rate=1", "learning_rate", "`optimizer.lr`"),
        ("gradient_accumulation_steps=1", "gradient_accumulation_steps", "the planner makes the microbatches"),
        *((f"{key}={name}", key, "an existing folder") for key, name in (("model", "a/b/c"), ("tokenizer", "~/gone"))),
        ("optimizer.learning=1", "optimizer.learning", "-> `optimizer.lr`"),
        ("eval={data: [{path: train.jsonl, max_token: 4}]}", "eval.data.0.max_token", "`max_tokens`"),
        ('model="a\\0b"', "model", ""),
        (f"tokenizer={'x' * 300}", "tokenizer", ""),
        (f"output={'y/' * 3000}", "output", ""),
        ("global_batch={sequences: 1, tokens: 1}", "global_batch", ""),
        ("data.0.python_stdlib=true", "data.0", ""),
        ("data.0={max_tokens: 4}", "data.0", "got none of them"),
        ("data.0.too_long=skip", "data.0.too_long", ""),
        ("data.0.weight=0", "data.0.weight", ""),
        ("data.0.data_files='*.csv'", "data.0.data_files", "a `dataset` beside it"),
        ("data.0.path=s3://bucket/train.jsonl", "data.0.path", "a path on this machine"),
        ("data.0.path=https://host/train.jsonl", "data.0.path", ":// can only be streamed"),
        ("data.0={dataset: org/name}", "data.0.split", "the split of the dataset"),
        ("data.0={dataset: org/name, split: 'train[:10%]'}", "data.0.split", ""),
        ("data.0={dataset: ../name, split: train}", "data.0.dataset", ""),
        ("data.0={dataset: a/b, split: train, python_stdlib: true}", "data.0", "got dataset and python_stdlib"),
        ("data.0={python_stdlib: true, split: train}", "data.0.split", "a `dataset` beside it"),
        ("data.0={path: train.jsonl, streaming: true}", "data.0.max_tokens", "`streaming`"),
        (f"data.0={{{STREAM}, weight: 2}}", "data.0.weight", "no weight beside `streaming`"),
        (f"data.0={{{STREAM}, remote: true}}", "data.0.streaming", "got both"),
        ("data.0.streaming=0", "data.0.streaming", ""),
        (f"eval={{data: [{{{STREAM}}}]}}", "eval.data.0.streaming", ""),
        ("data.0={path: train.jsonl, remote: true}", "data.0.max_tokens", ""),
        (f"data.0={{{REMOTE}, weight: 2}}", "data.0.weight", ""),
        ("data.0={path: train.jsonl, remote: 0, max_tokens: 9}", "data.0.remote", ""),
        (f"data=[{{{REMOTE}}}, {{path: train.jsonl}}]", "data.1.remote", ""),
        (f"eval={{data: [{{{REMOTE}}}]}}", "eval.data.0.remote", ""),
        ("eval={data: [{path: train.jsonl, weight: 1}, {path: train.jsonl, weight: 2}]}", "eval.data.1.weight", ""),
    ],
    ids=lambda each: each[:60],
)
def test_config_wrong_value_names_its_path(folder, override, where, expected):
    found = problems_of(write(folder, MINIMAL), [override])
    assert list(found) == [where]
    assert expected in found[where]
    assert len(found[where]) < 600


@pytest.mark.parametrize("source", [STREAM, REMOTE])
def test_config_epochs_are_not_counted_before_their_rows_come(folder, source):
    assert list(problems_of(write(folder, MINIMAL + "epochs: 2\n"), [f"data.0={{{source}}}"])) == ["epochs"]


def applied(*overrides):
    values = {"seed": 1, "data": [{"path": "a"}, {"path": "b"}], "eval": None, "optimizer": {"lr": 1.0}}
    return values, apply_overrides(values, overrides)


def test_override_reaches_keys_entries_and_sections_and_the_last_one_wins():
    values, problems = applied(
        "optimizer.lr=3e-4", "data.1.path=c", "seed = 5", "model=x=y", "eval.every_steps=5", "eval.every_steps=7",
        "a.b.c={d: [1]}",
    )  # fmt: skip
    assert problems == []
    assert values == {
        "seed": 5, "model": "x=y", "data": [{"path": "a"}, {"path": "c"}], "eval": {"every_steps": 7},
        "optimizer": {"lr": 3e-4}, "a": {"b": {"c": {"d": [1]}}},
    }  # fmt: skip
    values, _ = applied("data=[{python_stdlib: true}]", "optimizer=")
    assert (values["data"], values["optimizer"]) == ([{"python_stdlib": True}], None)


def test_config_names_for_keys_of_other_trainers_are_keys_of_ours():
    sections = sections_of(RunConfig).items()
    known = {".".join((*path, key)) for path, each in sections for key in each.model_fields}
    for hint in _OTHER_KEYS.values():
        assert {name.replace(".0.", ".") for name in re.findall(r"`([\w.]+)", hint)} <= known, hint


def test_config_takes_the_planner_of_an_installed_package(folder, monkeypatch):
    path = write(folder, MINIMAL)
    assert "planner" in problems_of(path, ["planner=mine"])
    (folder / "mine-1.dist-info").mkdir()
    (folder / "mine-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (folder / "mine-1.dist-info/entry_points.txt").write_text("[lengthwise.planners]\nmine = mine:plan\n")
    monkeypatch.syspath_prepend(folder)
    config = load_config(path, ["planner=mine"])
    assert config.planner == "mine"
    assert build_config(config.model_dump(), folder) == config
    assert "planner" in problems_of(path, ["planner=others"])


def test_config_tokens_are_read_as_on_the_command_line(folder):
    given = ["capacity_tokens=8K", "data.0.max_tokens=4K", "global_batch={tokens: 1.5M}"]
    config = load_config(write(folder, MINIMAL), given)
    assert (config.capacity_tokens, config.data[0].max_tokens, config.global_batch.tokens) == (8192, 4096, 3 * 2**19)


def test_config_all_problems_come_in_one_message(folder):
    text = """
modle: tiny
data: [{path: nowhere.jsonl}, {python_stdlib: true, too_long: skip}, 5]
steps: yes
steps: 3
epochs: 2
optimizer: {lr: 1, lr: fast}
tokenizer: ./nowhere
global_batch: {sequences: 1, tokens: 1}
wandb: 1
zzz: 2
"""
    found = problems_of(write(folder, text), ["x", "data.9.path=y"])
    path = folder / "run.yaml"
    assert set(found) == {
        f"{path}:5", f"{path}:7", "overrides x", "overrides data.9", "modle", "output", "data.0.path",
        "data.1.too_long", "data.2", "steps", "optimizer.lr", "tokenizer", "global_batch", "wandb", "zzz",
    }  # fmt: skip
    lines = [int(at[1]) for told in found.values() if (at := re.search(rf"{re.escape(str(path))}:(\d+)", told))]
    assert lines == sorted(lines)
    assert len(lines) == len(found) - 3, "all but the overrides and a key that is not there; `model` is `modle`"


def test_config_relative_paths_start_from_the_file(folder, monkeypatch):
    (folder / "texts").mkdir()
    (folder / "org" / "name").mkdir(parents=True)
    path = write(folder, MINIMAL)
    monkeypatch.chdir(folder.parent)
    relative = Path(folder.name) / path.name
    config = load_config(relative, ["data.0.path=texts", "model=org/name", "output=../out"])
    assert config.data[0].path == folder / "texts"
    assert config.model == str(folder / "org" / "name")
    assert config.output == folder.parent / "out"
    for kind, first in (("json", str(folder / "rows/*.json")), ("org/data", "rows/*.json")):  # the latter of a hub
        given = f"data=[{{dataset: {kind}, data_files: [rows/*.json, 'https://a/b.json'], split: train}}]"
        assert load_config(relative, [given, "model=org/name"]).data[0].data_files == (first, "https://a/b.json")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a mapping; got null"),
        (b"model: \xff\n", "byte 0xff at offset 7"),
        (b"a: 1\n---\nb: 2\n", "expected YAML"),
        (b"a: &x [1]\nb: *x\n", "an alias, which is not read"),
        (b"a: " + b"[" * 900, "deeper nesting"),
        (None, "no such file"),
        ("folder", "a folder"),
    ],
)
def test_config_unreadable_file_is_one_line(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert str(path) in caught.value.where


def test_config_and_data_import_no_large_library():
    large = "{'torch', 'transformers', 'datasets', 'pyarrow'}"
    code = f"import sys, lengthwise.config, lengthwise.data; print({large} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_config_with_thousands_of_problems_is_told_of_some_in_seconds(folder):
    start = time.process_time()
    found = problems_of(write(folder, MINIMAL + "".join(f"k{number}: 1\n" for number in range(2_000))))
    assert time.process_time() - start < 2
    assert len(found) == 101
    assert "got 1,900 more problems" in found["run file"]
