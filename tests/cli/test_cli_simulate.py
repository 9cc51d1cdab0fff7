"""`lengthwise simulate`: figures and files, without torch; own data, what it is counted in; ends of its processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testing.small import make_rows, write_model

from cli.calls import OWN, SMALL
from lengthwise.cli.sources import listed_lengths
from run.small_runs import children, told, write_rows, write_run
from tiers import more


@pytest.mark.exhaustive
def test_simulate_published_lengths_writes_json_traces_and_a_page(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    rest = ("--mesh", "same", "--lengths", "github", "--context", "64K", "--out", out)
    said = told(capsys, "simulate", *SMALL, *rest)
    written = json.loads((out / "simulation.json").read_text())
    assert written["batch_tokens"] == [256 * 1024] * 2
    assert written["longest_tokens"] <= written["context_tokens"] == 64 * 1024
    assert {"static", "single-degree", "power-of-two", "bytescale", "lengthwise"} <= set(written["planners"])
    ours = written["planners"]["lengthwise"]
    assert all(step >= bound for step, bound in zip(ours["step_seconds"], ours["bound_seconds"], strict=True))
    words = " ".join(said.split())
    assert f"{ours['speedup_over_best_other']:.2f}x" in words
    assert f"{100 * ours['ideal_ratio']:.1f} %" in words
    assert "All planners used one mesh" in words
    for planner in written["planners"]:
        assert json.loads((out / f"trace-{planner}.json").read_text())["traceEvents"]
    assert "<svg" in (out / "report.html").read_text()


@pytest.mark.exhaustive
def test_simulate_pipelines_stage_by_stage(tmp_path, capsys) -> None:
    mesh = ("--mesh", "same", "--lengths", "github", "--context", "64K", "--pp", 4, "--planners", "lengthwise")
    for name, mode in {"piped": ("--mode", "pipeline", "--virtual", 2), "free": ("--mode", "free")}.items():
        told(capsys, "simulate", *SMALL, *mesh, *mode, "--batches", 1, "--out", tmp_path / name)
    piped, free = (json.loads((tmp_path / name / "simulation.json").read_text()) for name in ("piped", "free"))
    assert (piped["mode"], piped["planners"]["lengthwise"]["stages"], piped["virtual"]) == ("pipeline", 4, 2)
    assert piped["planners"]["lengthwise"]["mean_seconds"] < free["planners"]["lengthwise"]["mean_seconds"]
    trace = json.loads((tmp_path / "piped" / "trace-lengthwise.json").read_text())["traceEvents"]
    assert "rank 0, stage 3" in {event["args"].get("name") for event in trace}


def test_published_lengths_with_prompts_fill_batches_within_the_context() -> None:
    """At least the asked tokens, prompts counted; a batch without its last sequence has fewer."""
    batches, context = listed_lengths("github").batches(200_000, 2, 4096, devices=2, prompt_tokens=1024)
    assert batches[0] != batches[1]
    for batch in batches:
        assert 1024 < min(batch) < max(batch) == context == 4096
        assert sum(batch[:-1]) < 200_000 <= sum(batch)


def test_simulate_takes_a_models_folder_without_torch(tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3}
    config |= {"intermediate_size": 1024, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(config))
    run = "import sys; from lengthwise.cli import main\ntry:\n    main(sys.argv[1:])\n"
    run += "finally:\n    print([name for name in ('torch', 'transformers') if name in sys.modules])"
    arguments = ["simulate", *map(str, OWN), "--lengths", "prolong", "--context", "4K", "--out", str(tmp_path / "out")]
    arguments += ["--planners", "lengthwise"]
    arguments[arguments.index("llama-7b")] = "my-model"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", run, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "\nmy-model on 4 devices of h100; 1 batch" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    del config["intermediate_size"], config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    error = told(capsys, *arguments, status=2)
    assert "--model my-model: config key intermediate_size: expected" in error
    assert "--model my-model: config key vocab_size: expected" in error


@pytest.mark.exhaustive
def test_simulate_again_takes_the_place_of_the_earlier_run(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    rest = (*OWN, "--lengths", "prolong", "--context", "4K", "--out", out)
    told(capsys, "simulate", *rest, "--planners", "static,bytescale,lengthwise")
    (out / "notes.txt").write_text("mine")
    (out / "trace-mine.json").write_text("mine")
    told(capsys, "simulate", *rest, "--planners", "lengthwise")
    assert {each.name for each in out.iterdir()} == {
        "simulation.json", "report.html", "trace-lengthwise.json", "notes.txt", "trace-mine.json",
    }  # fmt: skip
    assert list(json.loads((out / "simulation.json").read_text())["planners"]) == ["lengthwise"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("simulation.json", "not JSON"),
        ("simulation.json", '{"schema": "lengthwise.simulation/1", "planners": []}'),
        ("report.html", "mine"),
        ("trace-static.json", "mine"),
    ],
)
def test_simulate_touches_no_files_of_others(tmp_path, capsys, monkeypatch, name: str, text: str) -> None:
    monkeypatch.setattr("lengthwise.simulator.best_mesh", lambda *_, **__: pytest.fail("planned"))
    (tmp_path / name).write_text(text)
    error = told(capsys, "simulate", *OWN, "--lengths", "prolong", "--context", "4K", "--out", tmp_path, status=2)
    assert f"got {name}, not written by a simulation" in error
    assert (tmp_path / name).read_text() == text


def test_simulate_answers_first_in_one_sentence(tmp_path, capsys) -> None:
    """Nothing is written unasked; adapters and kernels are priced."""
    asked = ("--model", "Qwen/Qwen3-8B", "--gpus", 8, "--lengths", "github", "--batch-tokens", "64K", "--batches", 1)
    found = {}
    for name, given in {"lora": ("--lora", 16), "quick": ("--lora", 16, "--kernel", "flash3")}.items():
        said = told(capsys, "simulate", *asked, *given, "--out", tmp_path / name)
        assert {each.name for each in (tmp_path / name).iterdir()} == {"simulation.json", "report.html"}
        found[name] = json.loads((tmp_path / name / "simulation.json").read_text())["answer"]
        assert said.splitlines()[0] == found[name]["sentence"]
    assert "LoRA of rank 16" in said
    pairs = zip(found["lora"]["rows"], found["quick"]["rows"], strict=True)
    assert {b["step_seconds"] < a["step_seconds"] for a, b in pairs if a["step_seconds"]} == {True}


def test_simulate_says_where_no_mesh_has_room(tmp_path, capsys) -> None:
    rest = ("--lengths", "prolong", "--context", "4K", "--batch-tokens", "16K", "--batches", 1)
    asked = ("simulate", "--model", "llama-70b", "--gpus", 2, *rest)
    said = told(capsys, *asked)
    assert "no method here can hold these sequences" in said
    assert said.count("does not fit: no room beside") == 7
    assert "Use more devices (--gpus, --pp)" in told(capsys, *asked, "--details", "--out", tmp_path / "out", status=2)


def texts(*given):
    return [{"text": text} for text in given]


def test_simulate_leaves_empty_rows_out_only_when_told(tmp_path, capsys) -> None:
    rows, out = write_rows(tmp_path / "my.jsonl", texts("x" * 900, "", "y")), tmp_path / "out"
    arguments = (*OWN, "--data", rows, "--out", out, "--planners", "lengthwise")
    error = told(capsys, "simulate", *arguments, status=2)
    assert "my.jsonl:2" in error
    assert "--empty skip" in error
    assert "--data.0" not in error
    said = told(capsys, "simulate", *arguments, "--empty", "skip")
    assert "1 row left out (empty)" in said
    assert "texts counted in bytes, not tokens" in said
    figures = json.loads((out / "simulation.json").read_text())
    assert (figures["rows_left_out"], figures["lengths_in"], figures["longest_tokens"]) == ({"empty": 1}, "bytes", 900)


def test_simulate_takes_several_files_of_data(tmp_path, capsys) -> None:
    (tmp_path / "shards").mkdir()
    shards = [write_rows(tmp_path / "shards" / f"{n}.jsonl", texts("x" * n, "y")) for n in (30, 700)]
    rest = (*OWN, "--planners", "lengthwise", "--out", tmp_path / "out")
    said = told(capsys, "simulate", *rest, "--data", *shards)
    assert f"{shards[0]} and 1 other, longest 700" in said
    (tmp_path / "shards" / "notes.txt").write_text("x")
    assert "--data FOLDER/*.jsonl" in told(capsys, "simulate", *rest, "--data", tmp_path / "shards", status=2)
    write_rows(shards[1], texts("", "x"))
    error = told(capsys, "simulate", *rest, "--data", *shards, status=2)
    assert "700.jsonl:1" in error
    assert "--empty skip" in error
    assert "--data.1" not in error


def test_simulate_takes_model_and_data_of_a_run_file(tmp_path, capsys) -> None:
    """Its batch, too: test_cli_data.py."""
    path = write_run(tmp_path, make_rows([30, 700]), model=str(write_model(tmp_path / "model", weights=False)))
    asked = ("--gpus", 2, "--batches", 1)
    said = told(capsys, "simulate", path, *asked, "--batch-tokens", "4K")
    assert f"1 batch of 4,380 tokens of {path}, longest 700" in said
    assert "counted in bytes" not in said
    error = told(capsys, "simulate", path, *asked, "--lengths", "github", "--tokenizer", "x", status=2)
    assert "got RUN.yaml and --lengths" in error
    path.write_text(path.read_text().replace("model:", "model: org/name\nno:"))
    (tmp_path / "model" / "config.json").unlink()
    error = told(capsys, "simulate", path, *asked, "--empty", "skip", status=2)
    assert "Add --model qwen3-8b" in error
    assert "--empty: expected nothing beside a run file" in error


ENDLESS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # both may be ignored where the tests run in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from lengthwise import simulator
simulator.best_mesh = lambda *_, **__: time.sleep(600)
import os
os.cpu_count = lambda: 2
from lengthwise.cli import main
main(sys.argv[1:])
"""
SEARCH = ("simulate", "--model", "llama-7b", "--ranks", "4", "--batch-tokens", "4K", "--batches", "1", "--lengths",
         "prolong", "--context", "4K", "--planners", "packed-dp,lengthwise")  # fmt: skip


def waited(is_so: Callable[[], bool], seconds: float = 90) -> bool:
    until = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < until:
        time.sleep(0.05)
    return so


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="searches in processes on Linux alone")
@pytest.mark.parametrize(
    ("to_child", "sent", "status", "told"),
    [
        more(True, signal.SIGKILL, 1, "fewer devices or --planners, or --mesh same"),
        (False, signal.SIGINT, 130, "interrupted"),
        more(False, signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_simulate_ends_with_all_its_processes(tmp_path, to_child, sent, status, told) -> None:
    run = [sys.executable, "-c", ENDLESS, *SEARCH, "--out", str(tmp_path / "out")]
    command = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert waited(lambda: len(children(command.pid)) == 2)
        time.sleep(0.5)
        searching = children(command.pid)
        os.kill(searching[0] if to_child else command.pid, sent)
        said = command.communicate(timeout=30)[1]
        assert waited(lambda: not any(map(is_running, searching)))
    finally:
        command.kill()
        command.communicate()
    assert command.returncode == status
    assert told in said
    assert "Traceback" not in said
