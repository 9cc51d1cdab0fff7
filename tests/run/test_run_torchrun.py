"""A run under torchrun whose ranks die: the agent starts them again, and the run goes on by itself."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from testing.faults import VARIABLE

import lengthwise
from run.small_runs import Command, assert_equal_runs, losses, read_lines, whole
from run.test_run_resume import run_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(path, *options, fault="", restarts=1):
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "RANK"))}
    command = [*TORCHRUN, "--max-restarts", str(restarts), "-m", "lengthwise", "train", str(path), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env={**outside, "OMP_NUM_THREADS": "1", VARIABLE: fault}, **pipes) as process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the agent and its ranks
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ranks_that_an_agent_starts_again_go_on(tmp_path):
    """As torchrun does it, but forked: a rank dies, the others end, and all are started with a count of restarts.

    On two nodes, each with a count of its own: that of a node whose ranks lived stays.
    """
    path = run_of(tmp_path)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    said = []
    for restart in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            world["MASTER_PORT"] = str(free.getsockname()[1])
        world |= {VARIABLE: "update:1:4:kill"}
        arguments = ("train", path, "--timeout-seconds", 20)
        counts = [{"TORCHELASTIC_RESTART_COUNT": str(restart * rank)} for rank in range(2)]
        ranks = [Command(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **world | counts[rank]) for rank in range(2)]
        said.append([rank.finish() for rank in ranks])
    assert [status for status, _, _ in said[0]] == [1, -signal.SIGKILL]
    assert [status for status, _, _ in said[1]] == [0, 0], said[1]
    assert "after step 2" in said[1][0][1]
    assert_equal_runs(tmp_path / "out", whole(path, ranks=2))


@pytest.mark.exhaustive
def test_a_killed_rank_is_started_again_and_the_run_goes_on_by_itself(tmp_path):
    path = run_of(tmp_path)
    wanted = whole(path, ranks=2)
    done = run(path, fault="update:1:4:kill")
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    assert done.stdout.count("step 7/7") == 1, "rank 0 speaks, and only rank 0"
    assert_equal_runs(tmp_path / "out", wanted)


@pytest.mark.exhaustive
def test_another_torchrun_neither_deletes_nor_goes_on_with_a_run(tmp_path):
    path = run_of(tmp_path)
    wanted = whole(path, ranks=2)
    lengthwise.train(path, ranks=2)
    before = (tmp_path / "out/metrics.jsonl").read_bytes()
    again = run(path, restarts=2)
    assert again.returncode != 0
    assert "expected no run in the output folder" in again.stderr
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == before
    assert run(path, "--overwrite", fault="update:0:4:kill").returncode == 0
    assert len(read_lines(tmp_path / "out/metrics.jsonl")) == 7
    assert losses(tmp_path / "out") == losses(wanted)
