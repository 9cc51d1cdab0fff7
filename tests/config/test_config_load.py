"""The run file as a user writes it: defaults, strict types, all problems at once, paths, the way back to YAML."""

import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.config import DataSource, GlobalBatch, RunConfig, build_config, dump_config, load_config
from lengthwise.config.foreign_names import FOREIGN_NAMES
from lengthwise.config.optimizer import OPTIMIZERS
from lengthwise.config.schema import SECTIONS
from lengthwise.core.errors import ConfigError, LengthwiseError, Problems

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


def test_config_minimal_file_gets_the_defaults_of_the_listing(folder):
    minimal = load_config(write(folder, MINIMAL))
    listed = load_config(write(folder, LISTING))
    assert minimal == listed.model_copy(update={"eval": None, "tokenizer": None})
    assert (minimal.steps, minimal.epochs, minimal.global_batch) == (100, None, GlobalBatch(sequences=64))
    assert (minimal.optimizer.betas, minimal.optimizer.eps) == ((0.9, 0.95), 1e-8)


def test_config_each_optimizer_has_its_own_defaults_and_is_read_back(folder):
    for name, defaults in OPTIMIZERS.items():
        config = load_config(write(folder, MINIMAL + f"optimizer: {{name: {name}}}\n"))
        given = {key: value for key, value in config.optimizer.model_dump().items() if value is not None}
        assert (
            given.items()
            >= {key: value for key, value in {**defaults, "name": name}.items() if value is not None}.items()
        )
        assert load_config(write(folder, dump_config(config))) == config


def test_config_epochs_take_the_place_of_steps(folder):
    config = load_config(write(folder, MINIMAL + "epochs: 2\n"))
    assert (config.steps, config.epochs) == (None, 2)


def test_config_every_field_tells_its_default(folder):
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        if not field.is_required() and name not in ("optimizer", "epochs"):
            assert "default" in field.description, name


def test_config_tokenizer_name_follows_the_model(folder):
    assert load_config(write(folder, MINIMAL)).tokenizer_name == "bytes"
    assert load_config(write(folder, MINIMAL), ["model=org/name"]).tokenizer_name == "org/name"
    assert load_config(write(folder, MINIMAL), ["model=org/name", "tokenizer=bytes"]).tokenizer_name == "bytes"


def test_config_empty_rows_are_skipped_only_in_the_standard_library(folder):
    config = load_config(write(folder, MINIMAL), ["data=[{path: train.jsonl}, {python_stdlib: true}]"])
    assert [source.empty for source in config.data] == ["error", "skip"]


@pytest.mark.parametrize(
    ("override", "where", "expected"),
    [
        ("steps=true", "steps", "expected a whole number; got true (true/false)"),
        ("steps=1.5", "steps", "expected a whole number; got 1.5"),
        ("steps='3'", "steps", "expected a whole number; got '3' (text)"),
        ("steps=0", "steps", "expected at least 1; got 0"),
        ("steps=4_096", "steps", "expected a whole number; got '4_096' (text)"),
        ("seed=-1", "seed", "expected at least 0"),
        ("seed=9223372036854775808", "seed", "expected less than"),
        ("optimizer.lr=abc", "optimizer.lr", "expected a number; got 'abc' (text)"),
        ("optimizer.lr=true", "optimizer.lr", "expected a number"),
        ("optimizer.lr=.nan", "optimizer.lr", "expected a finite number"),
        ("optimizer.lr=.Inf", "optimizer.lr", "expected a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1", "no default"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1", "less than 1"),
        ("optimizer.betas=0.9", "optimizer.betas", "expected a list"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm", "more than 0"),
        ("optimizer.name=adamx", "optimizer.name", "Did you mean `adam`"),
        ("optimizer.name=muon", "optimizer.name", "depends on the whole matrix"),
        ("optimizer.name=lamb", "optimizer.name", "the norm of the whole parameter"),
        ("optimizer.name=adamw_8bit", "optimizer.name", "blocks that slices do not end at"),
        ("optimizer.name=adamw8bit", "optimizer.name", "blocks that slices do not end at"),
        ("optimizer.name=adamw_torch", "optimizer.name", "Here it is adamw"),
        ("optimizer={name: sgd, betas: [0.9, 0.95]}", "optimizer.betas", "it belongs to adamw, adam, lion"),
        ("optimizer.momentum=0.9", "optimizer.momentum", "it belongs to sgd"),
        ("optimizer.name=rmsprop", "optimizer.name", "A `Session` takes torch's own"),
        ("lora.use_dora=true", "lora.use_dora", "There is none"),
        ("optimizer.schedule=cosin", "optimizer.schedule", "Did you mean"),
        ("optimizer.schedule=greedy", "optimizer.schedule", "follows an evaluation's loss"),
        ("optimizer.schedule=cosine_with_min_lr", "optimizer.schedule_args", "got neither"),
        ("optimizer.schedule=warmup_stable_decay", "optimizer.schedule_args.num_decay_steps", "got none"),
        ("optimizer.schedule_args={power: 2}", "optimizer.schedule_args.power", "it belongs to polynomial"),
        ("optimizer.schedule_args={powr: 2}", "optimizer.schedule_args.powr", "belongs to no schedule"),
        ("optimizer={schedule: polynomial, lr: 1e-8}", "optimizer.schedule_args.lr_end", "less than lr, 1e-08"),
        (
            "optimizer={schedule: cosine_with_min_lr, lr: 1, schedule_args: {min_lr: 2}}",
            "optimizer.schedule_args.min_lr",
            "less than lr, 1; got 2",
        ),
        ("optimizer=adamw", "optimizer", "a mapping of keys"),
        ("precision=fp23", "precision", "Did you mean `fp32`?"),
        ("precision=fp16", "precision", "Did you mean `bf16`?"),
        ("planner=fastest", "planner", "'power-of-two' or 'packed-dp'"),
        ("model=", "model", "got null"),
        ("model=''", "model", "text that is not empty"),
        ("output=", "output", "expected a path; got null"),
        ("output=''", "output", "expected a folder"),
        ("output=s3://bucket/run", "output", "s3:// is not written yet"),
        ("data=[]", "data", "at least 1 entry"),
        ("data={path: train.jsonl}", "data", "expected a list"),
        ("data.0.path=''", "data.0.path", "an existing file or folder"),
        ("measurements=on", "measurements", "auto, off or an existing file"),
        ("measurements=.", "measurements", "a folder"),
        ("offload=0.5", "offload", "null, or off"),
        ("data.0.max_tokens=0", "data.0.max_tokens", "at least 1"),
        ("data.0.python_stdlib=yes", "data.0.python_stdlib", "true or false"),
        ("eval={}", "eval.data", "this key has no default"),
    ],
)
def test_config_wrong_value_names_its_path(folder, override, where, expected):
    found = problems_of(write(folder, MINIMAL), [override])
    assert list(found) == [where]
    assert expected in found[where]


@pytest.mark.parametrize(
    ("override", "where", "nearest"),
    [
        ("steeps=3", "steeps", "`steps`"),
        ("optimizer.learning=1", "optimizer.learning", "Known: betas, eps"),
        ("data.0.pth=x", "data.0.pth", "`path`"),
        ("global_batch={sequence: 3, tokens: 4}", "global_batch.sequence", "`sequences`"),
        ("eval={data: [{path: train.jsonl, max_token: 4}]}", "eval.data.0.max_token", "`max_tokens`"),
    ],
)
def test_config_unknown_key_names_the_nearest(folder, override, where, nearest):
    found = problems_of(write(folder, MINIMAL), [override])
    assert nearest in found[where]


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", "`optimizer.lr`"),
        ("per_device_train_batch_size", "`global_batch: {sequences: n}`"),
        ("gradient_accumulation_steps", "the planner makes the microbatches"),
        ("max_seq_length", "`data.0.max_tokens`"),
        ("sample_packing", "always packed"),
        ("bf16", "`precision: bf16`"),
        ("fp16", "There is none"),
        ("fsdp", "shard: zero3"),
        ("deepspeed", "shard: zero3"),
        ("load_in_4bit", "There is none"),
        ("warmup_ratio", "`optimizer.warmup_steps`"),
        ("save_steps", "`checkpoint.every_steps`"),
        ("lora_r", "`lora.r`"),
        ("context_parallel_size", "the planner chooses"),
        ("lr", "`optimizer.lr`"),
        ("path", "`data.0.path`"),
    ],
)
def test_config_key_of_another_trainer_is_told_our_word(folder, key, ours):
    assert ours in problems_of(write(folder, MINIMAL), [f"{key}=1"])[key]


def test_config_words_for_keys_of_other_trainers_are_keys_of_ours():
    for hint in FOREIGN_NAMES.values():
        for words in re.findall(r"Here it is `([\w.]+)", hint):
            *section, key = words.split(".")
            assert key in SECTIONS[tuple(section)].model_fields, hint
    assert not {key for section in SECTIONS.values() for key in section.model_fields} & set(FOREIGN_NAMES)


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


@pytest.mark.parametrize(
    ("planner", "package", "install"),
    [
        ("megatron-core", "megatron-core", "pip install --no-deps megatron-core=="),
        ("flexsp", "highspy", "pip install 'lengthwise[bench]'"),
    ],
)
def test_config_takes_a_planner_where_its_package_is_installed_and_says_how_to_install_it(
    folder, monkeypatch, planner, package, install
):
    path = write(folder, MINIMAL)
    monkeypatch.setattr("lengthwise.core.packages.distribution", lambda name: name)
    assert load_config(path, [f"planner={planner}"]).planner == planner

    def missing(name):
        assert name == package
        raise PackageNotFoundError(name)

    monkeypatch.setattr("lengthwise.core.packages.distribution", missing)
    told = problems_of(path, [f"planner={planner}"])["planner"]
    assert f"no {package} installed" in told
    assert install in told


def test_config_known_keys_are_listed_once(folder):
    found = problems_of(write(folder, MINIMAL), ["wandb=1", "zzz=2", "qqqq=3"])
    assert sum("Known: " in told for told in found.values()) == 1


@pytest.mark.parametrize("key", ["capacity_tokens", "data.0.max_tokens"])
def test_config_tokens_are_read_as_on_the_command_line(folder, key):
    path = write(folder, MINIMAL)
    config = load_config(path, [f"{key}=8K", "global_batch={tokens: 1.5M}"])
    assert (config.capacity_tokens, config.data[0].max_tokens)["max" in key] == 8192
    assert config.global_batch.tokens == 3 * 2**19
    assert "a whole number" in problems_of(path, [f"{key}=8Q"])[key]
    assert "a whole number" in problems_of(path, [f"{key}='8192'"])[key]


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ("capacity_tokens=8Q", "capacity_tokens", "expected 'auto' or a whole number; got '8Q'"),
        ("heads=0", "heads", "expected 'auto' or 'off' or at least 1; got 0"),
        ("offload={ratio: 1.5}", "offload.ratio", "expected 'auto' or 'off' or at most 1; got 1.5"),
    ],
)
def test_config_a_name_or_a_number_is_one_problem(folder, change, key, expected):
    found = problems_of(write(folder, MINIMAL), [change])
    assert list(found) == [key]
    assert expected in found[key]


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("data.0.python_stdlib=true", "data.0"),
        ("data.0={max_tokens: 4}", "data.0"),
        ("data.0={python_stdlib: false}", "data.0"),
        ("data.0.too_long=skip", "data.0.too_long"),
        ("global_batch={}", "global_batch"),
        ("global_batch={sequences: 1, tokens: 1}", "global_batch"),
        ("eval={data: [{}]}", "eval.data.0"),
    ],
)
def test_config_rule_between_keys_names_the_section(folder, override, where):
    assert list(problems_of(write(folder, MINIMAL), [override])) == [where]


def test_config_source_of_a_wrong_type_is_one_problem(folder):
    found = problems_of(write(folder, MINIMAL), ["data=[{python_stdlib: yes}]"])
    assert list(found) == ["data.0.python_stdlib"]


def test_config_steps_and_epochs_together_are_refused(folder):
    assert "at most one" in problems_of(write(folder, MINIMAL + "epochs: 1\nsteps: 1\n"))["steps"]


def test_config_all_problems_come_in_one_message(folder):
    text = """
modle: tiny
data: [{path: nowhere.jsonl}, {python_stdlib: true, too_long: skip}, 5]
steps: yes
steps: 3
epochs: 2
optimizer: {lr: fast, lr: 1}
tokenizer: ./nowhere
global_batch: {sequences: 1, tokens: 1}
"""
    found = problems_of(write(folder, text), ["x", "data.9.path=y"])
    path = folder / "run.yaml"
    assert set(found) == {
        f"{path}:5",
        f"{path}:7",
        "overrides x",
        "overrides data.9",
        "modle",
        "model",
        "output",
        "data.0.path",
        "data.1.too_long",
        "data.2",
        "steps",
        "optimizer.lr",
        "tokenizer",
        "global_batch",
    }


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


@pytest.mark.parametrize("name", ["./gone", "../gone", "/gone/model", "~/gone-model", "a/b/c", "train.jsonl"])
@pytest.mark.parametrize("key", ["model", "tokenizer"])
def test_config_name_that_reads_like_a_path_has_to_be_a_folder(folder, key, name):
    found = problems_of(write(folder, MINIMAL), [f"{key}={name}"])
    assert "an existing folder" in found[key]


def test_config_hub_name_and_builtin_names_stay(folder):
    (folder / "tiny").mkdir()
    (folder / "bytes").mkdir()
    config = load_config(write(folder, MINIMAL), ["tokenizer=bytes"])
    assert (config.model, config.tokenizer) == ("tiny", "bytes")
    assert load_config(write(folder, MINIMAL), ["model=org/name"]).model == "org/name"


def test_config_home_of_nobody_is_a_problem_not_a_traceback(folder):
    assert "data.0.path" in problems_of(write(folder, MINIMAL), ["data.0.path=~nobody-of-this-name/x"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a mapping; got null"),
        (b"- a\n", "a mapping; got ['a'] (a list)"),
        (b"model: \xff\n", "byte 0xff at offset 7"),
        (b"model: [tiny\n", "expected YAML"),
        (b"a: 1\n---\nb: 2\n", "expected YAML"),
        (b"model: \x07\n", "expected YAML"),
        (b"a: &x [1]\nb: *x\n", "without aliases"),
        (b"a: " + b"[" * 5000, "levels"),
    ],
)
def test_config_unreadable_file_is_one_line(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert str(path) in caught.value.where


def test_config_missing_file_and_folder_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="a folder"):
        load_config(tmp_path)


def test_config_build_leaves_the_values_alone(folder):
    values = {"model": "tiny", "data": [{"path": "train.jsonl"}], "output": "out"}
    config = build_config(values, folder)
    assert values["data"] == [{"path": "train.jsonl"}]
    assert config.data == (DataSource(path=folder / "train.jsonl"),)


def test_config_dump_of_the_listing_reads_back_equal(folder, tmp_path_factory):
    config = load_config(write(folder, LISTING))
    elsewhere = write(tmp_path_factory.mktemp("elsewhere"), dump_config(config))
    assert load_config(elsewhere) == config


NAMES = st.text(st.characters(min_codepoint=33, exclude_characters="/~", exclude_categories=["Cs", "Cc"]), min_size=1)
FLOATS = st.floats(min_value=0, max_value=0.99)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=NAMES | st.sampled_from(["3e-4", "no", "0o17", "null", "1:30", "2020-01-01", "=", "<<", "1_0"]),
    lr=st.floats(min_value=0, allow_nan=False, allow_infinity=False) | st.integers(0, 10**6),
    betas=st.tuples(FLOATS, FLOATS),
    norm=st.none() | st.floats(min_value=1e-300, max_value=1e300),
    end=st.sampled_from([{"steps": 7}, {"epochs": 3}, {}]),
    batch=st.sampled_from([{"sequences": 5}, {"tokens": 10**12}]),
)
def test_config_dump_reads_back_equal(folder, model, lr, betas, norm, end, batch):
    values = {"model": model, "data": [{"python_stdlib": True}], "output": "out", "global_batch": batch, **end}
    values["optimizer"] = {"lr": lr, "betas": list(betas), "max_grad_norm": norm}
    if (folder / model).exists():
        return
    config = build_config(values, folder)
    assert load_config(write(folder, dump_config(config))) == config


def test_config_and_data_import_no_large_library():
    large = "{'torch', 'transformers', 'datasets', 'pyarrow'}"
    code = f"import sys, lengthwise.config, lengthwise.data; print({large} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_config_with_thousands_of_problems_is_told_of_some_in_seconds(folder):
    """Each unknown key looks for the nearest known one, and each problem was compared with all before it."""
    start = time.process_time()
    found = problems_of(write(folder, MINIMAL + "".join(f"k{number}: 1\n" for number in range(20_000))))
    assert time.process_time() - start < 15
    assert len(found) == 101
    assert "got 19,900 more problems" in found["run file"]


@pytest.mark.parametrize("key", ["model", "tokenizer", "output"])
@pytest.mark.parametrize("name", ['"a\\0b"', "x" * 300, "y/" * 3000])
def test_config_paths_that_nothing_can_have_are_one_line(folder, key, name):
    keys = {"model": "tiny", "data": "[{path: train.jsonl}]", "output": "out", key: name}
    found = problems_of(write(folder, "".join(f"{name}: {value}\n" for name, value in keys.items())))
    assert list(found) == [key]
    assert len(found[key]) < 400


def test_config_weights_are_of_training_data_alone(folder):
    weighted = "{path: train.jsonl, weight: 2}"
    text = f"model: tiny\ndata: [{weighted}]\noutput: out\n"
    assert load_config(write(folder, text)).data[0].weight == 2.0
    path = write(folder, text + f"eval: {{data: [{{path: train.jsonl, weight: 1}}, {weighted}]}}\n")
    assert list(problems_of(path)) == ["eval.data.1.weight"]
    assert list(problems_of(write(folder, text), ["data.0.weight=0"])) == ["data.0.weight"]


EVAL = "eval: {data: [{path: train.jsonl, max_tokens: 9, remote: true}]}\n"


@pytest.mark.parametrize(
    ("data", "more", "key"),
    [
        ("[{path: train.jsonl, remote: true}]", "", "data.0.max_tokens"),
        ("[{path: train.jsonl, remote: true, max_tokens: 9, weight: 2}]", "", "data.0.weight"),
        ("[{path: train.jsonl, remote: 0, max_tokens: 9}]", "", "data.0.remote"),
        ("[{path: train.jsonl, remote: 2, max_tokens: 9}, {path: train.jsonl}]", "", "data.1.remote"),
        ("[{path: train.jsonl, remote: true, max_tokens: 9}]", "epochs: 2\n", "epochs"),
        ("[{path: train.jsonl}]", EVAL, "eval.data.0.remote"),
    ],
)
def test_config_remote_data_says_what_is_not_counted_before_it_comes(folder, data, more, key):
    assert list(problems_of(write(folder, f"model: tiny\ndata: {data}\noutput: out\n{more}"))) == [key]
