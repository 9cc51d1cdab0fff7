"""A run under torchrun whose ranks die: the agent starts them again, and the run goes on by itself."""

import os
import signal
import subprocess
import sys

import pytest

import lengthwise
from lengthwise.core.faults import VARIABLE
from tiers import more
from training.small_runs import losses, read_lines
from training.test_training_resume import assert_equal_runs, run_of, whole

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(path, *options, fault="", restarts=1):
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "RANK"))}
    command = [*TORCHRUN, "--max-restarts", str(restarts), "-m", "lengthwise", "train", str(path), *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**outside, "OMP_NUM_THREADS": "1", VARIABLE: fault},
    ) as process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the agent and its ranks
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("rank", [more(0), 1])
def test_a_killed_rank_is_started_again_and_the_run_goes_on_by_itself(tmp_path, rank):
    path = run_of(tmp_path)
    wanted = whole(path, ranks=2)
    done = run(path, fault=f"update:{rank}:4:kill")
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    assert_equal_runs(tmp_path / "out", wanted)


@pytest.mark.exhaustive
def test_without_a_checkpoint_it_starts_again(tmp_path):
    path = run_of(tmp_path, checkpoint=None)
    wanted = whole(path, ranks=2)
    done = run(path, fault="update:1:4:kill")
    assert done.returncode == 0, done.stderr
    assert_equal_runs(tmp_path / "out", wanted)


@pytest.mark.exhaustive
def test_another_torchrun_neither_deletes_nor_goes_on_with_a_run(tmp_path):
    path = run_of(tmp_path)
    whole(path, ranks=2)
    lengthwise.train(path, ranks=2)
    before = (tmp_path / "out/metrics.jsonl").read_bytes()
    again = run(path, restarts=2)
    assert again.returncode != 0
    assert "expected no run in the output folder" in again.stderr
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == before
    assert run(path, "--overwrite", fault="update:0:4:kill").returncode == 0
    assert len(read_lines(tmp_path / "out/metrics.jsonl")) == 7
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
