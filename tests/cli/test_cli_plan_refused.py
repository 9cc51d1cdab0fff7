"""What `lengthwise plan` refuses: by option, with what to change, all at once, and nothing is written."""

import os

import pytest
from testing.small import VOCAB, make_rows

from cli.plan_calls import refused
from run.small_runs import write_run

BASE = {"--lengths": "lengths.json", "--ranks": "2", "--capacity": "64", "--out": "plan.json"}
CONFIG = "--lengths - --config run.yaml"
NAME = "x" * 300


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, text in {
        "lengths.json": "[5, 70, 9]",
        "cost.json": '{"linear_seconds": 1}',
        "bad-cost.json": '{"linear_seconds": -1, "speed": 1}',
        "twice-seed.json": '{"recipe": "byted", "tokens": 100, "seed": 1, "seed": 2}',
        "twice.json": '{"linear_seconds": 1, "linear_seconds": 2}',
        "speeds.json": "[NaN, 0]",
        "recipe.json": "{}",
    }.items():
        (folder / name).write_text(text)
    write_run(folder, make_rows([3]), model="tiny")
    long = {"global_batch": {"sequences": 3}, "capacity_tokens": 30}
    write_run(folder / "long", make_rows([3, 4, 70]), model="tiny", **long)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    return folder


def arguments_of(changes):
    """Return the arguments of a call whose options differ so; `-` leaves one out."""
    words = changes.split()
    options = {**BASE, **dict(zip(words[::2], words[1::2], strict=True))}
    return [f"{name}={value}" for name, value in options.items() if value != "-"]


@pytest.mark.parametrize(
    ("changes", "told"),
    {
        "--capacity -": ["--capacity", "--recompute auto"],
        "--lengths -": ["got none"],
        "--planner statik": ["`static`"],
        "--model-shape lama-7b": ["llama-7b", "or a model's folder or its config.json"],
        "--hardware h1000": ["Did you mean `h100`?", "or the path of a JSON file"],
        "--capacity 8kilo": ["--capacity: expected a whole number of tokens, such as 8192, 256K"],
        "--ranks 1000000000": ["--ranks: expected a whole number from 1 to 262144"],
        f"{CONFIG} --ranks 0": ["ranks", "got 0"],
        "--capacity 30": ["sequence 1", "70 tokens", "3 ranks", "raise --capacity to 35"],
        "--lengths - --config long/run.yaml --capacity -": ["70 tokens", "3 ranks", "raise capacity_tokens to 35"],
        "--lengths - --config long/run.yaml --capacity 20": ["raise --capacity to 35"],
        "--speeds 1,1,1": ["--speeds: expected 2, one per rank; got 3"],
        "--speeds 1,quick": ["--speeds: entry 2"],
        "--speeds 0x1": ["--speeds: entry"],
        "--speeds speeds.json": ["rank 0", "rank 1"],
        "--lengths twice-seed.json": ['the key "seed" twice'],
        "--cost twice.json": ['the key "linear_seconds" twice'],
        "--cost pipe": ["pipe"],
        "--out folder": ["error[output] "],
        "--out lengths.json/plan.json": ["error[output] "],
        f"--out {NAME}": ["one that is too long"],
        "--cost bad-cost.json": ["linear_seconds", "speed"],
        "--cost cost.json --model-shape llama-7b --hardware h100": ["--model-shape", "--hardware"],
        "--cost cost.json --ranks-per-node 8": ["--ranks-per-node"],
        "--cost cost.json --offload auto --heads auto": ["offload: expected off", "heads: expected off"],
        f"{CONFIG} --ranks-per-node 8": ["--hardware"],
        f"{CONFIG} --model-shape llama-7b": ["--model-shape: expected --hardware beside it", "Add --hardware h100"],
        f"{CONFIG} --recompute layer": ["--config"],
        "--mode wave": ["waves"],
        "--mode waves --planner static": ["static"],
        "--stages 4": ["Use mode pipeline, or leave --stages out."],
        "--mode pipeline": ["stages: expected a number in mode pipeline; got none. Give --stages."],
        "--mode pipeline --stages 33": ["1 to the 32 layers"],
        "--recompute auto": ["nothing beside --recompute auto"],
        "--capacity - --recompute auto --model-shape llama-70b": [
            "--model-shape llama-70b: expected weights, gradients and optimizer that leave room for 128 tokens",
            "Give --capacity in place of --recompute auto.",
        ],
    }.items(),
)
def test_plan_refuses_what_cannot_be(files, monkeypatch, capfd, changes, told):
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    err = refused(capfd, *arguments_of(changes), code=1 if NAME in changes else 2)
    assert [each for each in told if each not in err] == [], err
    assert "capacity_tokens" not in err or "capacity_tokens" in str(told), "options, not arguments of the library"
    assert "--tp" not in err
    assert sorted(files.iterdir()) == before


def test_plan_tells_all_that_is_wrong_with_a_command_line_at_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text("[0, 1.5]")
    (tmp_path / "cost.json").write_text('{"linear_seconds": -1}')
    (tmp_path / "out").mkdir()
    wrong = (
        "--ranks 0 --capacity 0 --cost cost.json --planner statik --mode fre --offload maybe --heads maybe "
        "--speeds fast --recompute layer --hardware h100 --stages 0 --out out"
    )
    err = refused(capfd, *arguments_of(wrong))
    for told in (
        "lengths.json[0]:", "lengths.json[1]:", "cost.json: linear_seconds:", "--ranks:", "--planner:", "--mode:",
        "--offload:", "--heads:", "--speeds: entry 1:", "--recompute:", "--hardware:", "--stages:", "out:",
    ):  # fmt: skip
        assert f"] {told}" in err or f"/{told}" in err, told


def test_plan_of_a_run_file_says_all_bad_rows_at_once_as_training_does(tmp_path, capfd):
    path = write_run(tmp_path, [{"input_ids": [VOCAB, 1]}, {"input_ids": [1.5]}, {"nothing": 1}])
    err = refused(capfd, "--config", path, "--ranks", 1, "--out", tmp_path / "plan.json")
    assert [f"train.jsonl:{row}" in err for row in (1, 2, 3)] == [True] * 3
