"""`lengthwise simulate --data`: own texts and tokens, several files, and what they are counted in."""

import json

from testing.small import make_rows, write_model

from cli.calls import OWN
from run.small_runs import told, write_rows, write_run


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
