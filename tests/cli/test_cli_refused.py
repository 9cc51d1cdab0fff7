"""What commands refuse: by option, with what to change, all at once, before they plan or start, and write nothing."""

import os

import pytest
from testing.small import VOCAB, make_rows

from cost.measured_samples import measurements_of, samples_of
from cost.test_cost_fit import machine
from run.small_runs import call, write_run

PLAN = {"--lengths": "lengths.json", "--ranks": "2", "--capacity": "64", "--out": "plan.json"}
CONFIG = "--lengths - --config run.yaml"
NAME = "x" * 300
MEASURED = "--lengths lengths.json --ranks 2 --measurements measured.json"
SIMULATE = "simulate --model llama-7b --batch-tokens 256K --batches 2 --capacity 8K"
GITHUB = f"{SIMULATE} --ranks 16 --out out --lengths github"
ALL_OF_SIMULATE = (
    "model data empty gpus batch-tokens context capacity planners batches trace-ranks hardware mode offload heads"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, text in {
        "lengths.json": "[5, 70, 9]",
        "bad-lengths.json": "[0, 1.5]",
        "cost.json": '{"linear_seconds": 1}',
        "bad-cost.json": '{"linear_seconds": -1, "speed": 1}',
        "speeds.json": "[NaN, 0]",
        "rows.jsonl": '{"text": "a"}\n',
        "bad.jsonl": '{"text": "a"}\n{"txt": "b"}\n{"txt": "c"}\n',
        "measured.json": measurements_of(samples_of(machine())).to_json(),
    }.items():
        (folder / name).write_text(text)
    write_run(folder, make_rows([3]), model="tiny")
    long = {"global_batch": {"sequences": 3}, "capacity_tokens": 30}
    write_run(folder / "long", make_rows([3, 4, 70]), model="tiny", **long)
    write_run(folder / "auto", make_rows([9]), model="tiny", capacity_tokens="auto")
    write_run(folder / "bad", [{"input_ids": [VOCAB, 1]}, {"input_ids": [1.5]}, {"nothing": 1}])
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    return folder


def assert_refused(folder, monkeypatch, capfd, words, told, code=2):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("lengthwise.run.api.on_ranks", None)
    monkeypatch.setattr("lengthwise.simulator.best_mesh", None)
    before = {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    assert call(*words) == code
    err = " ".join(capfd.readouterr().err.split())
    assert [each for each in told if each not in err] == [], err
    assert "Traceback" not in err
    assert "defect" not in err
    assert {each: each.stat().st_mtime_ns for each in folder.iterdir()} == before
    return err


@pytest.mark.parametrize(
    ("changes", "told"),
    {
        "--capacity -": ["--capacity", "--recompute auto"],
        "--lengths -": ["got none"],
        "--model-shape lama-7b": ["llama-7b", "or a model's folder or its config.json"],
        "--hardware h1000": ["Did you mean `h100`?", "or the path of a JSON file"],
        "--capacity 8kilo": ["--capacity: expected a whole number of tokens, such as 8192, 256K"],
        "--ranks 1000000000": ["--ranks: expected a whole number from 1 to 262144"],
        f"{CONFIG} --ranks 0": ["ranks", "got 0"],
        "--capacity 30": ["sequence 1", "70 tokens", "3 ranks", "raise --capacity to 35"],
        "--lengths - --config long/run.yaml --capacity -": ["70 tokens", "3 ranks", "raise capacity_tokens to 35"],
        "--lengths - --config long/run.yaml --capacity 20": ["raise --capacity to 35"],
        "--lengths - --config bad/run.yaml --ranks 1": ["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"],
        "--lengths - --config auto/run.yaml --capacity -": ["--capacity: expected a number", "capacity_tokens: auto"],
        "--speeds 1,1,1": ["--speeds: expected 2, one per rank; got 3"],
        "--speeds 1,quick": ["--speeds: entry 2"],
        "--speeds 0x1": ["--speeds: entry"],
        "--speeds speeds.json": ["rank 0", "rank 1"],
        "--cost pipe": ["pipe"],
        "--out lengths.json/plan.json": ["error[output] "],
        f"--out {NAME}": ["one that is too long"],
        "--cost cost.json --model-shape llama-7b --hardware h100": ["--model-shape", "--hardware"],
        "--cost cost.json --ranks-per-node 8": ["--ranks-per-node"],
        "--cost cost.json --offload auto --heads auto": ["offload: expected off", "heads: expected off"],
        f"{CONFIG} --ranks-per-node 8": ["--hardware"],
        f"{CONFIG} --model-shape llama-7b": ["--model-shape: expected --hardware beside it", "Add --hardware h100"],
        f"{CONFIG} --recompute layer": ["--config"],
        "--mode waves --planner static": ["static"],
        "--stages 4": ["Use mode pipeline, or leave --stages out."],
        "--mode pipeline": ["stages: expected a number in mode pipeline; got none. Give --stages."],
        "--mode pipeline --stages 33": ["1 to the 32 layers"],
        "--recompute auto": ["nothing beside --recompute auto"],
        "--capacity - --recompute auto --model-shape llama-70b": ["leave room for 128 tokens", "Give --capacity in"],
        f"{MEASURED} --model-shape llama-7b --hardware h100 --stages 2": [
            f"{each}: expected nothing beside --measurements" for each in ("--model-shape", "--hardware", "--stages")
        ],
        "--lengths bad-lengths.json --ranks 0 --capacity 0 --cost bad-cost.json --planner statik --mode fre "
        "--offload maybe --heads maybe --speeds fast --recompute layer --hardware h100 --stages 0 --out folder": [
            "lengths.json[0]:", "lengths.json[1]:", "cost.json: linear_seconds:", "] --ranks:", "] --planner:",
            "] --mode:", "] --offload:", "] --heads:", "] --speeds: entry 1:", "] --recompute:", "] --hardware:",
            "] --stages:", "folder:",
        ],
    }.items(),
)  # fmt: skip
def test_plan_refuses_what_cannot_be(files, monkeypatch, capfd, changes, told):
    words = changes.split()
    options = {**PLAN, **dict(zip(words[::2], words[1::2], strict=True))}
    arguments = [f"{name}={value}" for name, value in options.items() if value != "-"]
    err = assert_refused(files, monkeypatch, capfd, ["plan", *arguments], told, 1 if NAME in changes else 2)
    assert "capacity_tokens" not in err or "capacity_tokens" in str(told), "options, not arguments of the library"
    assert "--tp" not in err


@pytest.mark.parametrize(
    ("command", "told"),
    {
        "trian": ["Did you mean `train`?"],
        "train run.yaml --ranks 0 --timeout-seconds -1": ["got 0", "--timeout-seconds"],
        "train run.yaml --ranks 0 --set optimizer.lrr=1": ["--ranks", "optimizer.lrr"],
        "train run.yaml --timeout-seconds 1e12": ["--timeout-seconds"],
        "train run.yaml --max-restarts=1001": ["--max-restarts"],
        "train run.yaml --resume --overwrite": ["expected --overwrite or --resume; got both"],
        "train run.yaml --rank 2": ["--ranks N"],
        "verify nowhere.yaml": ["nowhere.yaml"],
        "verify run.yaml --ranks 0": ["--ranks"],
        "verify run.yaml --set steps": ["--set steps"],
        "plan --ranks 1 --out p.json --config nowhere.yaml": ["nowhere.yaml"],
        "data": ["expected a run file or files of data"],
        "data no.jsonl --context many": ["no.jsonl: nothing there", "--context"],
        "data rows.jsonl --model llama-7b": ["expected --gpus beside it; got --model alone"],
        "data rows.jsonl --gpus 2": ["got --gpus alone"],
        "data rows.jsonl --gpus 0 --model lama": ["--gpus", "llama"],
        "data rows.jsonl --row 2": ["a row from 1 to 1; got 2"],
        "data rows.jsonl --row 0 --out /dev/null": ["--row", "a file to write"],
        "data run.yaml --tokenizer bytes": ["--tokenizer: expected none beside a run file"],
        "prepare rows.jsonl": ["--out: expected a folder", "--tokenizer: expected a tokenizer"],
        "prepare rows.jsonl no --out o --tokenizer bytes": ["no: nothing there"],
        "prepare run.yaml --out o --tokenizer bytes": ["--tokenizer: expected none beside a run file"],
        "prepare run.yaml --out o --eval": ["--eval: expected a run file with eval"],
        "prepare rows.jsonl --eval --workers 0 --out o": ["--eval: expected a run file", "--workers"],
        "prepare rows.jsonl --tokenizer bytes --too-long skip --out o": ["--too-long: expected --max"],
        "prepare --out o": ["expected a run file or files of data"],
        "prepare --verify": ["expected folders of prepared data"],
        "prepare rows.jsonl --out rows.jsonl/o --tokenizer bytes": ["expected a folder to write into"],
        "init --model qwen9 --data no --gpus 0 --hardware h200x": ["--model", "--data", "--gpus", "h200", "--force"],
        "init --model qwen3-8b --gpus 8 --out new.yaml --data bad.jsonl": ["error[data] bad.jsonl:2: ", 'got "txt"'],
        "profile --seconds 0 --longest long --hardware h10 --ranks 0 --disk none --out .": [
            "--seconds", "--longest", "--hardware", "--ranks", "--disk", "Choose another --out",
        ],
        "profile --ranks 1 --clock cpu --model none/there --out m.json": ["none/there"],
        f"simulate {MEASURED} --out out --model tiny --pp 2": ["--model: expected nothing beside", "--pp: expected no"],
        f"{SIMULATE} --ranks 16 --out out --lengths githup": ["Did you mean `github`"],
        f"{GITHUB} --data x.jsonl": ["one of RUN.yaml, --lengths and --data"],
        f"{GITHUB} --gpus 16": ["one of --ranks and --gpus"],
        f"{GITHUB} --ranks 1000000000": ["--ranks: expected a whole number from 1 to 262144"],
        f"{GITHUB} --pp 33": ["--pp: expected 1 to the 32 layers"],
        f"{GITHUB} --batch-tokens 8G --context 1": ["a batch of at most 4,194,304 sequences"],
        f"{GITHUB} --recompute auto": ["--capacity: expected nothing beside --recompute auto"],
        f"{GITHUB} --recompute all": ["--recompute: expected one of none, layer"],
        f"{GITHUB} --mode pipeline": ["--pp: expected a number in mode pipeline"],
        f"{GITHUB} --branches 8": ["--branches: expected 2 or more completions x 17 or more"],
        f"{GITHUB} --branches 8x16": ["--branches: expected 2 or more completions x 17 or more"],
        f"{GITHUB} --branches 8x1K --context 1K": ["more than the 1024 tokens of a prompt"],
        f"{GITHUB} --branches 8x1K --details": ["--branches: expected nothing beside planners"],
        f"{GITHUB} --lora 16 --details": ["--lora: expected nothing beside planners in detail"],
        f"{GITHUB} --kernel flash4": ["--kernel: expected one of flash2, flash3, cudnn"],
        f"{GITHUB} --mode free --virtual 2": ["Use mode pipeline, or leave --virtual out."],
        f"{GITHUB} --out lengths.json/out": ["a folder to write into"],
        f"{GITHUB} --out /proc/x": ["no permission to write into /proc"],
        "simulate --model lama --data none.jsonl --empty maybe --gpus 9 --pp 2 --batch-tokens x --context y "
        "--capacity z --planners statik --batches 0 --trace-ranks 0 --hardware h1 --mode fre --offload maybe "
        "--heads maybe --virtual 0 --out lengths.json": [
            *(f"] --{each}:" for each in ALL_OF_SIMULATE.split()), "] --virtual:", "error[output] lengths.json",
        ],
    }.items(),
)  # fmt: skip
def test_commands_refuse_what_cannot_be(files, monkeypatch, capfd, command, told):
    assert_refused(files, monkeypatch, capfd, command.split(), told)
