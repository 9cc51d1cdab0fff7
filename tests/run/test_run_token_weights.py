"""A weight a token: the loss is the weighed mean over the global batch, under any plan, prepared or not."""

import json

import pytest
import torch
from small_runs import call, losses, read_lines, steps_of, told, train, write_rows, write_run
from testing.small import make_rows, plain_loss, plain_training, relative

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
    """Return a run file, its rows, and what it wrote on 2 ranks."""
    rows, folder = weighed_rows(), tmp_path_factory.mktemp("weights")
    write_rows(folder / "held.jsonl", rows[:3])
    keys = {"optimizer": {"lr": 1e-2}, "eval": {"data": [{"path": "held.jsonl"}], "every_steps": 2}}
    path = write_run(folder, rows, steps=2, capacity_tokens=64, **keys)
    return path, rows, train(path, "--ranks", 2)


def test_losses_are_the_weighed_mean_on_any_ranks_in_chunks_and_whole(run, tmp_path):
    path, rows, output = run
    train(path, "--ranks", 3, "--set", f"output={tmp_path / 'out'}", "loss=whole")
    metrics = read_lines(output / "metrics.jsonl")
    expected, norms, model = plain_training(
        path.parent / "model", rows, steps_of(output), dtype=torch.float64, lrs=[row["lr"] for row in metrics]
    )
    for each in (losses(output), losses(tmp_path / "out")):
        assert max(map(relative, each, expected)) < 1e-6  # Hugging Face's own norms are in fp32
    assert max(map(relative, [row["grad_norm"] for row in metrics], norms)) < 1e-5
    held = read_lines(output / "eval.jsonl")[-1]["loss"]
    assert relative(held, plain_loss(model, rows[:3], torch.float64)) < 1e-5


@pytest.mark.exhaustive
def test_verify_holds_weights_to_one_process(run, capsys):
    assert "PASS" in told(capsys, "verify", run[0], "--ranks", 2)


@pytest.mark.exhaustive
def test_prepared_weights_train_to_the_same_bits(run, tmp_path):
    path, _, output = run
    out = tmp_path / "prepared"
    assert call("prepare", path.parent / "train.jsonl", "--out", out, "--tokenizer", "bytes") == 0
    data = json.dumps([{"path": str(out)}])
    train(path, "--ranks", 2, "--set", f"output={tmp_path / 'out'}", f"data={data}")
    found = [(losses(each), (each / "model/model.safetensors").read_bytes()) for each in (output, tmp_path / "out")]
    assert found[0] == found[1]
