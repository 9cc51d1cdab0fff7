"""A weight a token: the loss is the weighed mean over the global batch, under any plan, prepared or not."""

import json

import pytest
import torch
from small_runs import (
    call,
    losses,
    make_rows,
    plain_loss,
    plain_training,
    read_lines,
    relative,
    steps_of,
    train,
    write_rows,
    write_run,
)

from tiers import more

LENGTHS = [60, 2, 33, 1, 7, 90, 3, 31]


def weighed_rows(lengths=LENGTHS):
    rows = make_rows(lengths, seed=4)
    for number, row in enumerate(rows):
        if number % 3 != 2:  # the others have none
            length = len(row["input_ids"])
            row["weights"] = [*[0, 0.25, 1, 3.5, 1e-3][number:], *(0.1 * (1 + t % 7) for t in range(length))][:length]
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows, folder = weighed_rows(), tmp_path_factory.mktemp("weights")
    write_rows(folder / "held.jsonl", rows[:3])
    keys = {"optimizer": {"lr": 1e-2}, "eval": {"data": [{"path": "held.jsonl"}], "every_steps": 2}}
    return write_run(folder, rows, steps=4, capacity_tokens=64, **keys), rows


@pytest.mark.parametrize("chunks", ["chunked", more("whole")])
def test_losses_are_the_weighed_mean_on_any_ranks(run, tmp_path, chunks):
    path, rows = run
    found = {}
    for ranks in (2, 3):
        given = ["--set", f"output={tmp_path / str(ranks)}", "--set", f"loss={chunks}"]
        train(path, "--ranks", ranks, *given)
        found[ranks] = losses(tmp_path / str(ranks))
    steps = steps_of(tmp_path / "2")
    lrs = [row["lr"] for row in read_lines(tmp_path / "2" / "metrics.jsonl")]
    expected, norms, model = plain_training(path.parent / "model", rows, steps, dtype=torch.float64, lrs=lrs)
    for each in found.values():
        assert max(map(relative, each, expected)) < 1e-6  # Hugging Face's own norms are in fp32
    got = [row["grad_norm"] for row in read_lines(tmp_path / "2" / "metrics.jsonl")]
    assert max(map(relative, got, norms)) < 1e-5
    held = read_lines(tmp_path / "2" / "eval.jsonl")[-1]["loss"]
    assert relative(held, plain_loss(model, rows[:3], torch.float64)) < 1e-5


def test_verify_holds_weights_to_one_process(run, capsys):
    path, _ = run
    assert call("verify", path, "--ranks", 2) == 0
    assert "PASS" in capsys.readouterr().out


def test_prepared_weights_train_to_the_same_bits(run, tmp_path):
    path, _ = run
    out = tmp_path / "prepared"
    assert call("prepare", path.parent / "train.jsonl", "--out", out, "--tokenizer", "bytes") == 0
    found = []
    for name, data in (("rows", None), ("store", json.dumps([{"path": str(out)}]))):
        given = ["--set", f"data={data}"] if data else []
        train(path, "--ranks", 2, "--set", f"output={tmp_path / name}", *given)
        found.append((losses(tmp_path / name), (tmp_path / name / "model" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]


def test_equal_weights_change_nothing_but_rounding(tmp_path):
    rows = make_rows([40, 5, 17, 2])
    plain = write_run(tmp_path / "plain", rows, steps=2, capacity_tokens=64)
    weighed = [{**row, "weights": [2.5] * len(row["input_ids"])} for row in rows]
    other = write_run(tmp_path / "weighed", weighed, steps=2, capacity_tokens=64, model=tmp_path / "plain" / "model")
    assert max(map(relative, losses(train(plain, "--ranks", 2)), losses(train(other, "--ranks", 2)))) < 1e-12
