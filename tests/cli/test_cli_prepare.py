"""`lengthwise prepare`: what a run trains on is the same, and what is wrong is told before anything is written."""

import json
import re

import numpy as np
import pytest
from testing.small import make_rows

from lengthwise.data.prepared import NAME
from run.small_runs import call, write_rows, write_run

ROWS = [*make_rows([30, 12, 5, 60, 1, 17, 44]), {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]


def test_prepare_files_by_tokenizer_and_limits(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": ""}, {"text": "b" * 2000}])
    options = ("--tokenizer", "bytes", "--max-tokens", "1K", "--too-long", "skip", "--empty", "skip")
    assert call("prepare", path, "--out", tmp_path / "store", *options) == 0
    assert "1 sequences, 1 tokens of bytes, 0 with a loss, 1 left out (empty), 1 left out" in capsys.readouterr().out
    assert call("prepare", path, "--out", tmp_path / "store", *options) == 0
    assert "already prepared" in capsys.readouterr().out
    assert call("prepare", path, "--out", tmp_path / "store", "--tokenizer", "bytes", "--empty", "skip") == 2
    assert "give --overwrite to replace it" in capsys.readouterr().err
    assert call("prepare", path, "--out", tmp_path / "new", "--tokenizer", "bytes") == 2
    assert "rows.jsonl:2" in (error := capsys.readouterr().err)
    assert "add --empty skip" in error
    assert not (tmp_path / "new").exists()


def test_prepare_verifies_every_row(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}])
    assert call("prepare", path, "--out", tmp_path / "store", "--tokenizer", "bytes") == 0
    assert call("prepare", tmp_path / "store", "--verify") == 0
    rows = next((tmp_path / "store").glob("data-*.arrow"))
    rows.write_bytes(rows.read_bytes().replace(np.array([*b"abc"], dtype="<i4").tobytes(), b"abc\0def\0ghi\0"))
    capsys.readouterr()
    assert call("prepare", tmp_path / "store", "--verify") == 1
    assert "NOT what was prepared" in (told := capsys.readouterr().out)
    assert rows.name in told
    assert "rows.jsonl:1" in told
    (tmp_path / "store" / NAME).unlink()
    assert call("prepare", tmp_path / "store", "--verify") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rows.jsonl"], ["--out: expected a folder", "--tokenizer: expected a tokenizer"]),
        (["rows.jsonl", "no", "--out", "o", "--tokenizer", "bytes"], ["no: nothing there"]),
        (["run.yaml", "--out", "o", "--tokenizer", "bytes"], ["--tokenizer: expected none beside a run file"]),
        (["run.yaml", "--out", "o", "--eval"], ["--eval: expected a run file with eval"]),
        (["rows.jsonl", "--eval", "--workers", "0", "--out", "o"], ["--eval: expected a run file", "--workers"]),
        (["rows.jsonl", "--tokenizer", "bytes", "--too-long", "skip", "--out", "o"], ["--too-long: expected --max"]),
        (["--out", "o"], ["expected a run file or files of data"]),
        (["--verify"], ["expected folders of prepared data"]),
        (["rows.jsonl", "--out", "rows.jsonl/o", "--tokenizer", "bytes"], ["expected a folder to write into"]),
    ],
)
def test_prepare_tells_all_that_is_wrong(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, ROWS)
    write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    assert call("prepare", *arguments) == 2
    error = capsys.readouterr().err
    assert [each for each in told if each not in error] == []
    assert not (tmp_path / "o").exists()


def test_store_in_a_run_file_is_checked_before_any_process_starts(tmp_path, capsys):
    path = write_run(tmp_path, ROWS, data=[{"path": "store"}])
    source = write_run(tmp_path, name="source.yaml")
    assert call("prepare", source, "--out", tmp_path / "store") == 0
    manifest = json.loads((tmp_path / "store" / NAME).read_text())
    assert (manifest["rows"], manifest["kinds"]) == (len(ROWS), {"ids": len(ROWS)})
    next((tmp_path / "store").glob("data-*.arrow")).unlink()
    assert call("train", path, "--ranks", 2) == 2
    assert re.search(r"data-0\S+\.arrow: expected the \d+ bytes that were prepared", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
