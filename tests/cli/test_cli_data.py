"""`lengthwise data` and `lengthwise prepare`: what they count, name and refuse; what is prepared trains the same."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.small import make_rows

from data.stores import FILES, load, write_sources
from lengthwise.cli import data as data_verb
from lengthwise.data.prepared import NAME
from lengthwise.data.survey import stretches, survey
from properties import costly
from run.small_runs import told, write_rows, write_run

ROWS = [
    {"prompt": "What?", "completion": " <b>&"},
    {"text": "x" * 90},
    {"prompt": "What?", "completion": " <b>&"},
    {"text": 3},
    {"text": ""},
]


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def test_data_says_what_data_is(rows, tmp_path, capsys):
    text = told(
        capsys, "data", rows, "--context", 80, "--capacity", 40, "--gpus", 2, "--out", tmp_path / "page.html", status=2
    )
    for each in (
        "3 sequences, 110 bytes, median 10, longest 90, 1 left out (bad), 1 left out (empty)",
        "REFUSED a run stops before its first step: 2 problems",
        'rows.jsonl:4: expected "text" to be a string; got 3',
        "rows.jsonl:5: expected ",
        "loss    99 tokens have a loss, 90.0 %",
        "copies  1 row, 9.1 % of the tokens, are copies of earlier ones; most often, 2 times, rows.jsonl:1",
        "too long 1 row has more tokens than --context 80: rows.jsonl:2 (90)",
        "too long 1 row has more tokens than 2 GPUs of --capacity 40 tokens hold, 80: rows.jsonl:2 (90)",
        "row 1 (rows.jsonl:1): 10 tokens, 5 with a loss",
        "  no loss      5  'What?'\n  loss         5  ' <b>&'",
    ):
        assert each in text
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert "rows.jsonl:2" in page
    assert "default-src 'none'" in page


def test_data_and_train_judge_rows_alike_and_name_rows_without_a_loss(tmp_path, capsys, monkeypatch):
    silent = {"input_ids": [7, 8], "labels": [-100, -100]}
    path = write_run(tmp_path, [*make_rows([4, 5]), silent, {"text": 3}], steps=1, global_batch={"sequences": 2})
    assert "REFUSED" in told(capsys, "data", path, status=2)
    assert "train.jsonl:4" in told(capsys, "train", path, status=2)
    data = [{"path": "train.jsonl", "bad_rows": "skip"}]
    path = write_run(tmp_path, steps=1, global_batch={"sequences": 3}, data=data)
    with monkeypatch.context() as patch:
        patch.setattr(data_verb, "_refused", None)  # nothing could be refused, so nothing is read again
        text = told(capsys, "data", path)
    assert "bad     error[data] train.jsonl:4: " in text.replace(f"{tmp_path}/", "")
    assert "1 row without any: train.jsonl:3" in text
    assert "note    1 row without any token with a loss: train.jsonl:3" in told(capsys, "train", path)


def test_data_of_prepared_data_is_that_of_its_source(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", ROWS[:3])
    told(capsys, "prepare", path, "--out", tmp_path / "store", "--tokenizer", "bytes")
    assert told(capsys, "data", path) == told(capsys, "data", tmp_path / "store")


def test_data_of_a_run_file_and_of_ids_shows_ids(tmp_path, capsys):
    path = write_run(tmp_path, [*make_rows([4, 2]), {"input_ids": [7, 8, 9], "labels": [-100, -100, 9]}])
    text = told(capsys, "data", path)
    assert "3 sequences, 9 tokens," in text
    assert "row 3 (train.jsonl:3): 3 tokens, 1 with a loss\n  no loss      2  7 8\n  loss         1  9" in text
    assert "row 2 (train.jsonl:2): 2 tokens, 1 with a loss" in told(capsys, "data", path, "--row", 2)


def test_data_and_simulate_answer_alike(tmp_path, capsys):
    """Of a run file for its own first steps."""
    path = write_run(tmp_path, make_rows([4000] * 5 + [10000]), global_batch={"sequences": 3}, lora={"r": 4})
    asked = ("--gpus", 2, "--model", "qwen3-8b")
    (answer,) = re.findall("simulated: (.*)", told(capsys, "data", path, *asked))
    text = told(capsys, "simulate", path, *asked)
    assert text.splitlines()[0] == answer
    assert "13.7K tokens a step" in answer
    assert "LoRA of rank 4" in text


@given(files=FILES, most=st.integers(0, 400))
@costly
def test_survey_counts_what_is_there(tmp_path_factory, files, most):
    folder = tmp_path_factory.mktemp("data")
    dataset = load(*write_sources(folder, [[{"text": "one"}], *files]))
    rows = [tuple(each.tobytes() for each in dataset.read(i, 0, 10**6)) for i in dataset.ids.tolist()]
    found = survey(dataset, longest=3)
    assert found.copies.rows == len(rows) - len(set(rows))
    if found.copies.rows:
        ids = dataset.ids.tolist()
        assert rows[ids.index(found.copies.original)] == rows[ids.index(found.copies.first_copy)]
        assert found.copies.most == max(map(rows.count, rows))
    assert [int(dataset.lengths[i]) for i in found.longest] == sorted(found.lengths.tolist(), reverse=True)[:3]
    for row in found.longest:
        parts = stretches(dataset, row, most)
        length = min(most, int(dataset.lengths[row]))
        assert sum(len(each.ids) for each in parts) == length
        losses = sum(len(each.ids) for each in parts if each.has_loss)
        assert losses == sum(label != -100 for label in dataset.read(row, 1, most)[1].tolist())
        assert all(first.has_loss != second.has_loss for first, second in pairwise(parts))


PREPARED = [*make_rows([30, 12, 5, 60, 1, 17, 44]), {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]


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
    path = write_run(tmp_path, PREPARED, data=[{"path": "store"}])
    told(capsys, "prepare", write_run(tmp_path, name="source.yaml"), "--out", tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / NAME).read_text())
    assert (manifest["rows"], manifest["kinds"]) == (len(PREPARED), {"ids": len(PREPARED)})
    next((tmp_path / "store").glob("data-*.arrow")).unlink()
    said = told(capsys, "train", path, "--ranks", 2, status=2)
    assert re.search(r"data-0\S+\.arrow: expected the \d+ bytes that were prepared", said)
    assert not (tmp_path / "out").exists()
