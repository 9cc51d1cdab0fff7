"""`lengthwise plan`: on any machine, without torch, and just what training would do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.plan_calls import plan_without_torch, read_plan, refused
from lengthwise.core import host_memory
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from run.small_runs import VOCAB, call, make_rows, read_lines, train, write_model, write_run
from tiers import more


@pytest.mark.parametrize("planner", ["lengthwise", more("static")])
def test_plan_of_a_run_file_is_the_plan_of_the_first_step_of_training(tmp_path, planner):
    texts = [{"text": "x" * n} for n in (30, 1, 12, 5, 61, 2, 90, 17)]
    write_model(tmp_path / "model", vocab_size=256)
    path = write_run(
        tmp_path, texts, model=tmp_path / "model", tokenizer="bytes", global_batch={"sequences": 6}, planner=planner
    )
    said = plan_without_torch("--config", path, "--ranks", 3, "--out", tmp_path / "plan.json")
    assert "6 sequences" in said
    made = read_plan(tmp_path / "plan.json")
    output = train(path, "--ranks", 3, "--set", "steps=1")
    run = Plan.from_json(read_plan_text(output / "plans/step-000001.json.gz"))
    assert (made.tokens, made.microbatches, made.capacity) == (run.tokens, run.microbatches, run.capacity)
    assert (made.ranks, made.layers) == (3, 2)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "shard zero3: zero1 would take"),
        ({"shard": "zero3"}, ""),
        ({"shard": "hybrid", "ranks_per_node": 2}, ""),
        more({"planner": "static"}, ""),
    ],
)
def test_plan_takes_the_layout_that_training_takes(tmp_path, monkeypatch, capsys, keys, said):
    """With its costs: of a model with a tied head, in the memory that there is."""
    write_model(tmp_path / "model", vocab_size=256, tie_word_embeddings=True, num_hidden_layers=12)
    keys = {"model": tmp_path / "model", "tokenizer": "bytes", "global_batch": {"sequences": 6}, "steps": 1, **keys}
    path = write_run(tmp_path, [{"text": "x" * n} for n in (30, 1, 12, 5, 61, 2, 90, 17)], **keys)
    size = 38e6 if "planner" not in keys else 1e9
    monkeypatch.setattr(host_memory, "_cgroup_bytes", lambda: size)
    assert call("plan", "--config", path, "--ranks", 4, "--out", tmp_path / "plan.json") == 0
    assert said in " ".join(capsys.readouterr().out.split())
    made = read_plan(tmp_path / "plan.json")
    monkeypatch.setattr(host_memory, "_available_bytes", lambda: size)
    output = train(path, "--ranks", 4)
    run = Plan.from_json(read_plan_text(output / "plans/step-000001.json.gz"))
    assert (made.tokens, made.microbatches, made.capacity) == (run.tokens, run.microbatches, run.capacity)
    assert ("waves" in made.requires) == ("planner" not in keys)


def test_plan_of_the_tiny_model_needs_no_folder(tmp_path):
    path = write_run(tmp_path, make_rows([30, 12]), model="tiny")
    plan_without_torch("--config", path, "--ranks", 2, "--capacity", 40, "--out", tmp_path / "deep/er/plan.json")
    assert read_plan(tmp_path / "deep/er/plan.json").capacity == 40


def test_plan_of_lengths_and_of_a_recipe(tmp_path, capsys):
    (tmp_path / "list.json").write_text("[20000, 512, 700, 60000, 900, 1]")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": "byted", "tokens": 300_000, "seed": 1}))
    for name in ("list", "recipe"):
        out = tmp_path / f"{name}-plan.json"
        lengths = tmp_path / f"{name}.json"
        assert call("plan", "--lengths", lengths, "--ranks", 8, "--capacity", "65536", "--out", out) == 0
        said = capsys.readouterr().out
        assert "(model, not measured)" in said
        assert "\x1b" not in said
        plan = read_plan(out)
        assert (plan.ranks, plan.capacity, plan.layers) == (8, 65536, 32)
        if name == "list":
            assert plan.tokens == (20000, 512, 700, 60000, 900, 1)
        else:
            assert sum(plan.tokens) >= 150_000
    first = (tmp_path / "recipe-plan.json").read_bytes()
    assert call("plan", "--lengths", lengths, "--ranks", 8, "--capacity", "65536", "--out", out) == 0
    assert out.read_bytes() == first


def test_plan_wants_one_of_config_and_lengths(tmp_path, capfd, lengths):
    run = write_run(tmp_path, make_rows([3]), model="tiny")
    rest = ("--ranks", 2, "--capacity", 64, "--out", tmp_path / "plan.json")
    assert "--capacity" in refused(capfd, "--lengths", lengths, "--ranks", 2, "--out", tmp_path / "plan.json")
    assert "got neither" in refused(capfd, *rest)
    assert "got both" in refused(capfd, "--lengths", lengths, "--config", run, *rest)
    assert not (tmp_path / "plan.json").exists()


def test_plan_gives_the_nearest_name_of_an_unknown_one(tmp_path, capfd, lengths):
    rest = ("--lengths", lengths, "--ranks", 2, "--capacity", 64, "--out", tmp_path / "plan.json")
    assert "lengthwise" in refused(capfd, *rest, "--planner", "lenghtwise")
    assert "static" in refused(capfd, *rest, "--planner", "statik")
    said = refused(capfd, *rest, "--model-shape", "lama-7b")
    assert "llama-7b" in said
    assert "or a model's folder or its config.json" in said
    said = refused(capfd, *rest, "--hardware", "h1000")
    assert "Did you mean `h100`?" in said
    assert "or the path of a JSON file" in said


@pytest.mark.parametrize("source", ["lengths", "config"])
@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("key", ["capacity", "ranks"])
def test_plan_refuses_numbers_below_one(tmp_path, capfd, lengths, source, key, value):
    path = lengths if source == "lengths" else write_run(tmp_path, make_rows([3]), model="tiny")
    numbers = {"ranks": 2, "capacity": 64, key: value}
    keys = [f"--{name}={number}" for name, number in numbers.items()]
    err = refused(capfd, f"--{source}", path, *keys, "--out", tmp_path / "plan.json")
    assert key in err
    assert f"got {value}" in err


def test_plan_names_a_sequence_that_no_rank_holds_and_what_would(tmp_path, capfd, lengths):
    rest = ("--ranks", 2, "--out", tmp_path / "plan.json", "--capacity", 30)
    err = refused(capfd, "--lengths", lengths, *rest)
    assert "sequence 1" in err
    assert "70 tokens" in err
    assert "3 ranks" in err
    assert "35" in err
    run = write_run(tmp_path, make_rows([3, 4, 70]), model="tiny", global_batch={"sequences": 3})
    err = refused(capfd, "--config", run, *rest)
    assert "70 tokens" in err
    assert "3 ranks" in err


@pytest.mark.parametrize(
    "text", ["", "[", "[1e400]", "[NaN]", "null",
              "[]", "[1, 0]", "[1.5]", "[true]", '["3"]', "{}", '{"recipe": "byte"}',
             '{"recipe": "byted", "tokens": -1, "seed": 0}', '{"recipe": "byted", "tokens": 1000, "seeds": 0}'],
)  # fmt: skip
def test_plan_refuses_a_broken_lengths_file(tmp_path, capfd, text):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    err = refused(capfd, "--lengths", path, "--ranks", 2, "--capacity", 64, "--out", tmp_path / "plan.json")
    assert err.startswith("error[")
    assert not (tmp_path / "plan.json").exists()


def test_plan_that_cannot_be_written_says_so_and_leaves_nothing_behind(tmp_path, capfd, lengths):
    rest = ("--lengths", lengths, "--ranks", 2, "--capacity", 64)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for out in (tmp_path / "folder", lengths / "plan.json"):
        assert refused(capfd, *rest, "--out", out).startswith("error[output] ")
        assert sorted(tmp_path.iterdir()) == before
    assert lengths.read_text() == "[5, 70, 9]"


def test_plan_file_may_be_read_by_others(tmp_path, lengths):
    """A plan is handed to a colleague or to another job: it has the mode that the umask gives, as any file."""
    out = tmp_path / "plan.json"
    out.write_text("x" * 100_000)  # an older one, which is replaced whole
    before = os.umask(0o022)
    try:
        assert call("plan", "--lengths", lengths, "--ranks", 2, "--capacity", 64, "--out", out) == 0
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o644
    assert read_plan(out).tokens == (5, 70, 9)


def test_plan_out_of_this_command_is_what_verify_runs(tmp_path):
    path = write_run(tmp_path, make_rows([30, 12, 61]), global_batch={"sequences": 3})
    out = tmp_path / "plan.json"
    assert call("plan", "--config", path, "--ranks", 3, "--planner", "static", "--out", out) == 0
    assert call("verify", path, "--ranks", 3, "--plan", out) == 0


def test_plan_of_a_run_file_refuses_ids_outside_the_vocabulary(tmp_path, capfd):
    """What training refuses is no plan either."""
    path = write_run(tmp_path, [{"input_ids": [VOCAB, 1]}])
    assert call("train", path) == 2
    assert f"{VOCAB}" in capfd.readouterr().err
    assert "train.jsonl:1" in refused(capfd, "--config", path, "--ranks", 1, "--out", tmp_path / "plan.json")


def test_plan_says_all_bad_rows_at_once(tmp_path, capfd):
    path = write_run(tmp_path, [{"input_ids": [1]}, {"input_ids": [1.5]}, {"nothing": 1}], model="tiny")
    err = refused(capfd, "--config", path, "--ranks", 1, "--out", tmp_path / "plan.json")
    assert "train.jsonl:2" in err
    assert "train.jsonl:3" in err
    assert read_lines(Path(path.parent / "train.jsonl"))[0] == {"input_ids": [1]}


def test_plan_interrupted_while_it_starts_says_so(tmp_path):
    code = (
        "import sys, types\n"
        "class Interrupted(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        raise KeyboardInterrupt\n"
        "sys.modules['tyro'] = Interrupted('tyro')\n"
        "from lengthwise.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr == "interrupted: nothing was saved\n"


def test_plan_tells_all_that_is_wrong_with_a_command_line_at_once(tmp_path, capfd):
    (tmp_path / "lengths.json").write_text("[0, 1.5]")
    (tmp_path / "cost.json").write_text('{"linear_seconds": -1}')
    (tmp_path / "out").mkdir()
    err = refused(
        capfd, "--lengths", tmp_path / "lengths.json", "--ranks", 0, "--capacity", 0, "--cost", tmp_path / "cost.json",
        "--planner", "statik", "--mode", "fre", "--offload", "maybe", "--heads", "maybe", "--speeds", "fast",
        "--recompute", "layer", "--hardware", "h100", "--stages", "0", "--out", tmp_path / "out",
    )  # fmt: skip
    for told in (
        "lengths.json[0]:", "lengths.json[1]:", "cost.json: linear_seconds:", "--ranks:", "--planner:", "--mode:",
        "--offload:", "--heads:", "--speeds: entry 1:", "--recompute:", "--hardware:", "--stages:", f"{tmp_path}/out:",
    ):  # fmt: skip
        assert f"] {told}" in err or f"/{told}" in err, told
    err = refused(
        capfd, "--lengths", tmp_path / "none.json", "--ranks", 2, "--capacity", 0, "--model-shape", "lama",
        "--hardware", "h1", "--recompute", "layers", "--out", tmp_path / "plan.json",
    )  # fmt: skip
    for told in ("none.json:", "--model-shape:", "--hardware:", "--recompute:"):
        assert told in err


def test_plan_names_options_not_arguments_of_the_library(tmp_path, capfd, lengths):
    rest = ("--lengths", lengths, "--ranks", 2, "--out", tmp_path / "plan.json")
    assert "] --capacity: expected" in refused(capfd, *rest, "--capacity", 0)
    assert "--speeds: expected 2, one a rank; got 3" in refused(capfd, *rest, "--capacity", 64, "--speeds", "1,1,1")
    assert "--speeds: rank 1" in refused(capfd, *rest, "--capacity", 64, "--speeds", "1,0")
    err = refused(capfd, *rest, "--capacity", 30)
    assert "raise --capacity to 35" in err
    assert "capacity_tokens" not in err
    run = write_run(tmp_path, make_rows([3, 4, 70]), model="tiny", global_batch={"sequences": 3}, capacity_tokens=30)
    config = ("--config", run, "--ranks", 2, "--out", tmp_path / "plan.json")
    assert "raise capacity_tokens to 35" in refused(capfd, *config), "the run file's key, which the user wrote"
    assert "raise --capacity to 35" in refused(capfd, *config, "--capacity", 20)


def test_plan_refuses_a_key_twice_in_any_file(tmp_path, capfd, lengths):
    rest = ("--ranks", 2, "--capacity", 64, "--out", tmp_path / "plan.json")
    twice = tmp_path / "twice.json"
    twice.write_text('{"recipe": "byted", "tokens": 100, "seed": 1, "seed": 2}')
    assert 'the key "seed" twice' in refused(capfd, *rest, "--lengths", twice)
    twice.write_text('{"linear_seconds": 1, "linear_seconds": 2}')
    assert 'the key "linear_seconds" twice' in refused(capfd, *rest, "--lengths", lengths, "--cost", twice)
    assert 'the key "linear_seconds" twice' in refused(capfd, *rest, "--lengths", lengths, "--hardware", twice)
    assert 'the key "linear_seconds" twice' in refused(capfd, *rest, "--lengths", lengths, "--model-shape", twice)


def test_plan_takes_a_models_folder_for_its_shape(tmp_path, lengths, capsys):
    write_model(tmp_path / "my-model", vocab_size=256)
    rest = ("--lengths", lengths, "--ranks", 2, "--capacity", 64, "--out", tmp_path / "plan.json")
    plan_without_torch(*rest, "--model-shape", tmp_path / "my-model")
    assert read_plan(tmp_path / "plan.json").layers == 2


def test_plan_prints_names_of_files_as_they_are_and_one_thing_as_one(tmp_path, capsys):
    (tmp_path / "one.json").write_text("[5]")
    out = tmp_path / "[bold]plan[/red] :smile:.json"
    assert call("plan", "--lengths", tmp_path / "one.json", "--ranks", 1, "--capacity", 64, "--out", out) == 0
    said = capsys.readouterr().out
    assert f"written to {out}" in said
    assert "1 sequence, 5 tokens, longest 5; 1 rank of 64 tokens" in said


def test_plan_help_names_first_what_every_plan_needs(capsys):
    call("plan", "--help")
    options = re.findall(r"^\W? (--[a-z]+)", capsys.readouterr().out, re.MULTILINE)
    assert options[:5] == ["--config", "--lengths", "--ranks", "--capacity", "--out"]
    assert options[-4:] == ["--mode", "--virtual", "--offload", "--heads"]


@pytest.mark.exhaustive
def test_plan_cuts_nothing_on_narrow_terminals(tmp_path, lengths):
    arguments = ["--lengths", lengths, "--ranks", 2, "--capacity", 64, "--out", tmp_path / "plan.json"]
    run = [sys.executable, "-W", "error", "-m", "lengthwise", "plan", *map(str, arguments)]
    said = {}
    for columns in ("20", "40", "200"):
        done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "COLUMNS": columns}, check=True)
        assert "…" not in done.stdout
        said[columns] = sorted(set(done.stdout.split()))
    assert said["20"] == said["40"] == said["200"]


@pytest.mark.parametrize("option", ["--lengths", "--cost", "--hardware", "--model-shape", "--speeds", "--measurements"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_plan_refuses_files_without_an_end(tmp_path, capfd, option, kind):
    (tmp_path / "lengths.json").write_text("[5, 6]")
    odd = tmp_path / "odd.json"
    os.mkfifo(odd) if kind == "pipe" else odd.symlink_to("/dev/zero")
    options = {"--lengths": tmp_path / "lengths.json", "--ranks": 2, "--capacity": 64, "--out": tmp_path / "plan.json"}
    given = {**options, option: odd}
    err = refused(capfd, *(each for pair in given.items() for each in pair))
    assert str(odd) in err


def test_plan_into_a_name_that_is_too_long_is_one_line(tmp_path, capfd):
    (tmp_path / "lengths.json").write_text("[5, 6]")
    options = ["--lengths", tmp_path / "lengths.json", "--ranks", 2, "--capacity", 64]
    assert call("plan", *options, "--out", tmp_path / ("x" * 300)) != 0
    err = capfd.readouterr().err
    assert "one that is too long" in err
    assert err.count("\n") == 1
