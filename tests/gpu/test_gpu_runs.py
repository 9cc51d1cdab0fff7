"""Whole commands, one rank and two: on a GPU in processes of their own (two ranks share it), on the CPU in this one."""

import json
import re
import subprocess
import sys

import pytest
import torch
from testing.small import make_rows, write_model

from lengthwise.engine import objective
from run.small_runs import call, losses, write_run

LENGTHS = {"cuda": [300, 12, 5, 61, 128, 129, 1, 40], "cpu": [150, 6, 3, 31, 64, 65, 1, 20]}
CAPACITY = {"cuda": 256, "cpu": 128}  # of each of two ranks; one rank alone needs the longest row


@pytest.fixture
def run(device, capfd):
    def run(*arguments, status=0):
        """Run the command as a user does: a process that has started CUDA cannot fork ranks."""
        if device.type == "cpu":
            got = call(*arguments)
            said = "".join(capfd.readouterr())
        else:
            command = [sys.executable, "-m", "lengthwise", *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            got, said = done.returncode, done.stdout + done.stderr
        assert got == status, said
        return said

    return run


def run_file(folder, device, **keys):
    hidden = 256 if device.type == "cuda" else 32
    model = write_model(folder / "model", hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2)
    settings = {"device": device.type, "global_batch": {"sequences": 8}, **keys}
    return write_run(folder, make_rows(LENGTHS[device.type]), model=model, **settings)


def capacity_of(device, ranks):
    return CAPACITY[device.type] * (1 if ranks > 1 else 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "ranks"), [("bf16", 2), ("fp64", 2), ("fp32", 1), ("bf16", 1)])
def test_gpu_verify_passes(tmp_path, run, device, precision, ranks):
    path = run_file(tmp_path, device, precision=precision, capacity_tokens=capacity_of(device, ranks))
    said = run("verify", path, "--ranks", ranks)
    assert "PASS" in said
    assert "attention kernel: " in said
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        assert "through host memory" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_training_follows_the_cpu(tmp_path, run, device, ranks):
    """Both train in fp32."""
    found = []
    steps = 10 if device.type == "cuda" else 4
    for name, on, number in (("cpu", torch.device("cpu"), 2), ("device", device, ranks)):
        path = run_file(tmp_path / name, device, capacity_tokens=capacity_of(device, number), steps=steps)
        settings = json.loads(path.read_text()) | {"precision": "fp32", "device": on.type}
        path.write_text(json.dumps(settings))
        run("train", path, "--ranks", number)
        found.append(losses(tmp_path / name / "out"))
        row = json.loads((tmp_path / name / "out/metrics.jsonl").read_text().splitlines()[-1])
        assert 0 <= row["idle_ratio"] < 1
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_gpu_that_is_too_small_is_told_in_the_first_step(tmp_path, run, device, monkeypatch):
    """A hidden state of the longest row has 86 GB on a GPU; the CPU is given an error such as a GPU's."""
    tokens, hidden = (5_250_000, 4096) if device.type == "cuda" else (500, 32)
    if device.type == "cpu":
        monkeypatch.setattr(objective, "model_loss", _out_of_memory)
    model = write_model(tmp_path / "model", weights=False, hidden_size=hidden, max_position_embeddings=tokens)
    keys = {"device": device.type, "precision": "fp32", "capacity_tokens": tokens + 10}
    path = write_run(tmp_path, [{"input_ids": [1] * tokens}], model=model, global_batch={"sequences": 1}, **keys)
    said = run("train", path, "--ranks", 1, status=1)
    assert "error[memory] rank 0, step 1" in said
    assert re.search(rf"{tokens}\b.* tokens|tokens.*\b{tokens}\b", said)
    assert "Traceback" not in said
    assert not (tmp_path / "out/metrics.jsonl").exists()


def _out_of_memory(*_arguments, **_options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.11 GiB.")
