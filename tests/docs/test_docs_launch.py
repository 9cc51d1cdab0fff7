"""The files of docs/launch.md that start a run on several nodes: read, and run beside stand-ins of clusters."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from lengthwise.cli import read_command

PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
TORCHRUN, SLURM, KUBERNETES, SKYPILOT = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TRAIN = ["train", "/shared/first/run.yaml", "--resume-if-any"]


def stand_in(folder, name, text):
    """Write a command that stands for one of a cluster; return an environment that finds it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}


def started(script, tmp_path, **variables):
    """Run a script; return the words that it gives to torchrun."""
    environment = {**stand_in(tmp_path / "bin", "torchrun", 'printf "%s\\0" "$@"'), **variables}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def assert_starts(words, *options, train=TRAIN):
    """Assert that words for torchrun have these options and start `train`, which takes what it is given."""
    before, after = words[: words.index("-m")], words[words.index("-m") + 2 :]
    assert [each for each in ("--max-restarts 3 --rdzv-backend c10d", *options) if each not in " ".join(before)] == []
    assert after == train
    read_command(after)


def test_torchrun_lines_start_the_run_on_each_node(tmp_path):
    words = started(TORCHRUN, tmp_path, HEAD="")
    assert_starts(words, "--nnodes 2 --nproc-per-node 8", "--rdzv-endpoint node-0:29500")


def test_slurm_starts_one_torchrun_a_node(tmp_path):
    stand_in(tmp_path / "bin", "scontrol", r'[ "$*" = "show hostnames n[3-6]" ] && printf "n3\nn4\n"')
    stand_in(tmp_path / "bin", "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    words = started(SLURM, tmp_path, SLURM_JOB_NODELIST="n[3-6]")
    assert_starts(words, "--nnodes 2 --nproc-per-node 8", "--rdzv-endpoint n3:29500 --rdzv-id 7")


@pytest.mark.parametrize("script", [TORCHRUN, SLURM, SKYPILOT], ids=["torchrun", "slurm", "skypilot"])
def test_ranks_share_the_cores_of_a_node_unless_the_user_says_how(tmp_path, script):
    """torchrun would give each one thread."""
    (line,) = (each for each in script.splitlines() if "OMP_NUM_THREADS" in each)
    environment = stand_in(tmp_path / "bin", "nproc", "echo $CORES")
    environment.pop("OMP_NUM_THREADS", None)
    for cores, given, expected in (("35", {}, "4"), ("2", {}, "1"), ("35", {"OMP_NUM_THREADS": "6"}, "6")):
        own = {**environment, "CORES": cores, "SLURM_CPUS_ON_NODE": cores, **given}
        ask = f"set -eu; {line}\nexec printenv OMP_NUM_THREADS"
        assert subprocess.check_output(["bash", "-c", ask], env=own, text=True) == f"{expected}\n"


@pytest.mark.parametrize("ends", [1, 0])
def test_slurm_job_whose_time_is_over_saves_and_is_queued_again(tmp_path, ends):
    """Only if it has not ended; torchrun ends with 1 after SIGTERM."""
    log = tmp_path / "log"
    stand_in(tmp_path / "bin", "scontrol", f'[ "$1" = show ] && echo n0 || echo "$@" >> {log}')
    stand_in(tmp_path / "bin", "scancel", f'[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat {tmp_path}/pid)')
    trap = f"trap 'echo saved >> {log}; exit {ends}' TERM; echo $$ > {tmp_path}/pid; touch {log}"
    environment = stand_in(tmp_path / "bin", "srun", f"{trap}; for i in {{1..600}}; do sleep 0.05; done")
    with subprocess.Popen(["bash", "-c", SLURM], env={**environment, "SLURM_JOB_NODELIST": "n0"}) as job:
        until = time.monotonic() + 20
        while not log.exists() and time.monotonic() < until:
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)  # as SLURM does, to the script alone
        status = job.wait(20)
    assert log.read_text().split("\n")[:-1] == ["saved", *["requeue 7"] * ends]
    assert (status == 0) == (ends == 0)


def test_kubernetes_manifest_is_one_job_of_all_nodes():
    replicas = yaml.safe_load(KUBERNETES)["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    words = [*container["command"][1:], *container["args"]]
    assert_starts(
        words, "--nnodes 2 --nproc-per-node 8", "--rdzv-endpoint first-master-0:29500", "--local-addr $(POD_IP)"
    )


@pytest.mark.parametrize(("rank", "address", "is_host"), [(0, "10.0.0.5", "true"), (1, "10.0.0.9", "false")])
def test_skypilot_task_starts_torchrun_on_each_node(tmp_path, rank, address, is_host):
    task = yaml.safe_load(SKYPILOT)
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.9", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2"}
    words = started(task["run"], tmp_path, **nodes, SKYPILOT_NUM_GPUS_PER_NODE="8", **task["envs"])
    meeting = f"--local-addr {address} --rdzv-conf is_host={is_host}"
    train = ["train", "./run.yaml", "--set", f"output={task['envs']['OUTPUT']}", "--resume-if-any"]
    assert_starts(words, "--nnodes 2 --nproc-per-node 8", "--rdzv-endpoint 10.0.0.5:29500", meeting, train=train)
