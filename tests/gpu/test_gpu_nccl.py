"""NCCL where there is one GPU: ranks that it takes for machines. On the CPU the same, over gloo."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks_on_one_gpu import NCCL_OF_ONE_MACHINE
from testing.small import make_rows, write_model

from run.small_runs import write_run

SCRIPT = Path(__file__).with_name("ranks_on_one_gpu.py")
pytestmark = pytest.mark.exhaustive

SECONDS = {"cpu": 120, "cuda": 33}  # each of five tests: one that hangs leaves the others their time


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gpu_nccl_moves_and_sums(device, ranks):
    command = [sys.executable, str(SCRIPT), str(ranks), device.type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS[device.type])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ranks {ranks}, waited" in done.stdout
    assert done.stdout.startswith("NCCL" if device.type == "cuda" else "gloo")


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_gpu_nccl_verify_passes(tmp_path, device, shard):
    """Two ranks, started as by torchrun, each on a machine of its own as far as NCCL knows; rings are forced."""
    model = write_model(tmp_path / "model", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    settings = {"device": device.type, "precision": "fp32", "capacity_tokens": 100, "global_batch": {"sequences": 4}}
    settings |= {
        "shard": shard,
        "overlap": True,
    }  # sums are begun in backward, in the thread of autograd that a GPU has
    path = write_run(tmp_path, make_rows([150, 40, 20, 5]), model=model, **settings)
    outputs = _under_torchrun(["verify", str(path)], ranks=2, seconds=SECONDS[device.type])
    assert all(returncode == 0 for returncode, _ in outputs), outputs
    said = outputs[0][1]
    assert "PASS" in said
    assert f"transfers: {'NCCL' if device.type == 'cuda' else 'gloo'}" in said


def _under_torchrun(arguments, *, ranks, seconds):
    """Run the command once a rank, in the environment that torchrun makes; return (exit status, output) of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **NCCL_OF_ONE_MACHINE}
    processes = []
    for rank in range(ranks):
        own = {"RANK": rank, "NCCL_HOSTID": f"rank{rank}"}
        environment = os.environ | {name: str(value) for name, value in (common | own).items()}
        command = [sys.executable, "-m", "lengthwise", *arguments]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        last = time.monotonic() + seconds
        outputs = [process.communicate(timeout=last - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
