"""On a GPU: whole commands in processes of their own, one rank, and two that share the GPU."""

import json
import subprocess
import sys

import pytest
import torch

from training.small_runs import losses, make_rows, write_model, write_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (make gpu-check)")]

LENGTHS = [300, 12, 5, 61, 128, 129, 1, 40]


def run(*arguments, status=0):
    """Run the command as a user does: this process may have started CUDA, and such a one cannot fork ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "lengthwise", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_file(folder, *, hidden=256, **keys):
    model = write_model(folder / "model", hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2)
    settings = {"device": "cuda", "capacity_tokens": 256, "global_batch": {"sequences": 8}, **keys}
    return write_run(folder, make_rows(LENGTHS), model=model, **settings)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_verify_passes(tmp_path, precision, ranks):
    said = run("verify", run_file(tmp_path, precision=precision, capacity_tokens=600 // ranks), "--ranks", ranks)
    assert "PASS" in said
    assert "attention kernel: " in said
    if ranks > torch.cuda.device_count():
        assert "through host memory" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_training_follows_the_cpu(tmp_path, ranks):
    found = []
    for device in ("cpu", "cuda"):
        path = run_file(tmp_path / device, precision="fp32", device=device, steps=10)
        said = run("train", path, "--ranks", 2 if device == "cpu" else ranks)
        assert ("memory check: the largest microbatch, 256 tokens" in said) == (device == "cuda")
        found.append(losses(tmp_path / device / "out"))
        row = json.loads((tmp_path / device / "out/metrics.jsonl").read_text().splitlines()[-1])
        assert 0 <= row["idle_ratio"] < 1
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_gpu_that_is_too_small_is_told_before_the_first_step(tmp_path):
    path = run_file(tmp_path, hidden=1024, precision="fp32", capacity_tokens=50_000_000)
    rows = make_rows([20_000_000])
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run("train", path, "--ranks", 1, status=1)
    assert "error[memory] rank 0, memory check before the first step" in said
    assert "20000000 tokens" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out/metrics.jsonl").exists()
