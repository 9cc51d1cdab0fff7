"""`lengthwise prepare`: what a run trains on is the same, and what is wrong is told before anything is written."""

import json
import re

import numpy as np
from testing.small import make_rows

from lengthwise.data.prepared import NAME
from run.small_runs import told, write_rows, write_run

ROWS = [*make_rows([30, 12, 5, 60, 1, 17, 44]), {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]


def test_prepare_files_by_tokenizer_and_limits(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": ""}, {"text": "b" * 2000}])
    asked = ("prepare", path, "--tokenizer", "bytes", "--out")
    options = (tmp_path / "store", "--empty", "skip", "--max-tokens", "1K", "--too-long", "skip")
    text = told(capsys, *asked, *options)
    assert "1 sequences, 1 tokens of bytes, 0 with a loss, 1 left out (empty), 1 left out" in text
    assert "already prepared" in told(capsys, *asked, *options)
    assert "give --overwrite to replace it" in told(capsys, *asked, *options[:3], status=2)
    error = told(capsys, *asked, tmp_path / "new", status=2)
    assert "rows.jsonl:2" in error
    assert "add --empty skip" in error
    assert not (tmp_path / "new").exists()


def test_prepare_verifies_every_row(tmp_path, capsys):
    path, out = write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}]), tmp_path / "store"
    told(capsys, "prepare", path, "--out", out, "--tokenizer", "bytes")
    told(capsys, "prepare", out, "--verify")
    rows = next(out.glob("data-*.arrow"))
    rows.write_bytes(rows.read_bytes().replace(np.array([*b"abc"], dtype="<i4").tobytes(), b"abc\0def\0ghi\0"))
    text = told(capsys, "prepare", out, "--verify", status=1)
    assert [each for each in ("NOT what was prepared", rows.name, "rows.jsonl:1") if each not in text] == []
    (out / NAME).unlink()
    told(capsys, "prepare", out, "--verify", status=2)


def test_store_in_a_run_file_is_checked_before_any_process_starts(tmp_path, capsys):
    path = write_run(tmp_path, ROWS, data=[{"path": "store"}])
    told(capsys, "prepare", write_run(tmp_path, name="source.yaml"), "--out", tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / NAME).read_text())
    assert (manifest["rows"], manifest["kinds"]) == (len(ROWS), {"ids": len(ROWS)})
    next((tmp_path / "store").glob("data-*.arrow")).unlink()
    said = told(capsys, "train", path, "--ranks", 2, status=2)
    assert re.search(r"data-0\S+\.arrow: expected the \d+ bytes that were prepared", said)
    assert not (tmp_path / "out").exists()
