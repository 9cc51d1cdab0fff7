"""`lengthwise launch`: files that start a run on several nodes; they are read, and run beside stand-ins of clusters."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml

from lengthwise.cli import main, read_command

KINDS = ("torchrun", "slurm", "kubernetes", "skypilot")


@pytest.fixture
def run_file(tmp_path):
    """Write a run file with checkpoints, at a path that shells have to quote."""
    folder = tmp_path / 'it\'s $HOME, "here"'
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    path = folder / "First Run.yaml"
    path.write_text("model: tiny\ndata: [{path: rows.jsonl}]\noutput: out\ncheckpoint: {every_steps: 5}\n")
    return path


@pytest.fixture
def printed(run_file, capsys):
    """Return a call of the verb that returns what it printed."""

    def launch(kind, *options):
        with pytest.raises(SystemExit) as ended:
            main(["launch", "--print", kind, str(run_file), *options])
        told = capsys.readouterr()
        assert (ended.value.code, told.err) == (0, "")
        return told.out

    return launch


def without_checkpoint(path):
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "checkpoint" not in line))


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


def assert_starts(words, *options, train):
    """Assert that words for torchrun have these options and start `train`, which takes what it is given."""
    before, after = words[: words.index("-m")], words[words.index("-m") + 2 :]
    assert " ".join(options) in " ".join(before)
    assert before[before.index("--rdzv-backend") + 1] == "c10d"
    assert after == ["train", *train]
    read_command(after)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_names_the_run_and_what_to_edit(printed, run_file, kind):
    text = printed(kind)
    assert str(run_file) in text
    assert str(run_file.parent / "out") in text or kind == "skypilot", "it has an output of its own"
    assert "EDIT" in text
    assert "@" not in text.replace("@300", "")


def test_torchrun_lines_start_the_run_on_each_node(printed, run_file, tmp_path):
    options = ("--nnodes 3 --nproc-per-node 4", "--max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node-0:29500")
    script = printed("torchrun", "--nodes", "3", "--gpus-per-node", "4")
    assert_starts(started(script, tmp_path, HEAD=""), *options, train=[str(run_file), "--resume-if-any"])
    one = started(printed("torchrun", "--nodes", "1"), tmp_path, HEAD="")
    assert_starts(one, "--rdzv-endpoint localhost:29500", train=[str(run_file), "--resume-if-any"])


def test_slurm_starts_one_torchrun_a_node(printed, run_file, tmp_path):
    script = printed("slurm", "--nodes", "4")
    for line in ("nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "requeue", "signal=B:USR1@300"):
        assert f"#SBATCH --{line}\n" in script
    stand_in(tmp_path / "bin", "scontrol", r'[ "$*" = "show hostnames n[3-6]" ] && printf "n3\nn4\n"')
    stand_in(tmp_path / "bin", "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    words = started(script, tmp_path, SLURM_JOB_NODELIST="n[3-6]")
    meeting = "--max-restarts 3 --rdzv-backend c10d --rdzv-endpoint n3:29500 --rdzv-id 7"
    assert_starts(words, "--nnodes 4 --nproc-per-node 8", meeting, train=[str(run_file), "--resume-if-any"])


@pytest.mark.parametrize("kind", ["torchrun", "slurm", "skypilot"])
def test_ranks_share_the_cores_of_a_node_unless_the_user_says_how(printed, tmp_path, kind):
    """torchrun would give each one thread."""
    (line,) = (each for each in printed(kind, "--gpus-per-node", "3").splitlines() if "OMP_NUM_THREADS" in each)
    environment = stand_in(tmp_path / "bin", "nproc", "echo $CORES")
    environment.pop("OMP_NUM_THREADS", None)
    for cores, given, expected in (("13", {}, "4"), ("2", {}, "1"), ("13", {"OMP_NUM_THREADS": "6"}, "6")):
        own = {**environment, "CORES": cores, "SLURM_CPUS_ON_NODE": cores, **given}
        ask = f"set -eu; {line}\nexec printenv OMP_NUM_THREADS"
        assert subprocess.check_output(["bash", "-c", ask], env=own, text=True) == f"{expected}\n"


@pytest.mark.parametrize(("goes_on", "ends"), [(True, 1), (True, 0), (False, 1)])
def test_slurm_job_whose_time_is_over_saves_and_is_queued_again(printed, run_file, tmp_path, goes_on, ends):
    """Only where the run has checkpoints, and has not ended; torchrun ends with 1 after SIGTERM."""
    if not goes_on:
        without_checkpoint(run_file)
    log = tmp_path / "log"
    stand_in(tmp_path / "bin", "scontrol", f'[ "$1" = show ] && echo n0 || echo "$@" >> {log}')
    stand_in(tmp_path / "bin", "scancel", f'[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat {tmp_path}/pid)')
    trap = f"trap 'echo saved >> {log}; exit {ends}' TERM; echo $$ > {tmp_path}/pid; touch {log}"
    environment = stand_in(tmp_path / "bin", "srun", f"{trap}; for i in {{1..600}}; do sleep 0.05; done")
    with subprocess.Popen(["bash", "-c", printed("slurm")], env={**environment, "SLURM_JOB_NODELIST": "n0"}) as job:
        until = time.monotonic() + 20
        while not log.exists() and time.monotonic() < until:
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)  # as SLURM does, to the script alone
        status = job.wait(20)
    assert log.read_text().split("\n")[:-1] == ["saved", *["requeue 7"] * (goes_on and ends)]
    assert (status == 0) == (ends == 0)


def test_kubernetes_manifest_is_one_job_of_all_nodes(printed, run_file):
    job = yaml.safe_load(printed("kubernetes", "--nodes", "3", "--gpus-per-node", "4"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: (each["replicas"], each["restartPolicy"]) for name, each in replicas.items()} == {
        "Master": (1, "OnFailure"),
        "Worker": (2, "OnFailure"),
    }
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    head = f"{job['metadata']['name']}-master-0:29500"
    assert container["command"][0] == "torchrun"
    options = ("--nnodes 3 --nproc-per-node 4", f"--rdzv-endpoint {head}", "--local-addr $(POD_IP)")
    for option in options:
        words = [*container["command"][1:], *(each.replace("$$", "$") for each in container["args"])]
        assert_starts(words, option, train=[str(run_file), "--resume-if-any"])
    assert {"name": "OMP_NUM_THREADS", "value": "8"} in container["env"]
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 29500}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["volumeMounts"][0]["mountPath"] == str(run_file.parent)
    assert list(yaml.safe_load(printed("kubernetes", "--nodes", "1"))["spec"]["pytorchReplicaSpecs"]) == ["Master"]


@pytest.mark.parametrize(("rank", "address", "is_host"), [(0, "10.0.0.5", "true"), (1, "10.0.0.9", "false")])
def test_skypilot_task_starts_torchrun_on_each_node(printed, run_file, tmp_path, rank, address, is_host):
    task = yaml.safe_load(printed("skypilot"))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"].endswith(":8")
    assert task["workdir"] == str(run_file.parent)
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.9", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2"}
    words = started(task["run"], tmp_path, **nodes, SKYPILOT_NUM_GPUS_PER_NODE="8", **task["envs"])
    meeting = f"--local-addr {address} --rdzv-conf is_host={is_host}"
    train = [f"./{run_file.name}", "--set", f"output={task['envs']['OUTPUT']}", "--resume-if-any"]
    assert_starts(words, "--nnodes 2 --nproc-per-node 8 --max-restarts 3", train=train)
    assert_starts(words, "--rdzv-endpoint 10.0.0.5:29500", train=train)
    assert_starts(words, meeting, train=train)
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_checkpoints_is_not_started_again(printed, run_file, kind):
    without_checkpoint(run_file)
    text = printed(kind)
    assert "--resume" not in text
    assert "requeue\n" not in text.replace("--no-requeue\n", "")
    assert "OnFailure" not in text
    assert "--max-restarts 0" in text or '--max-restarts, "0"' in text
    assert "no `checkpoint`" in text


def test_all_that_is_wrong_is_told_at_once(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--print", "slrm", str(tmp_path / "none\n.yaml"), "--nodes", "0", "--gpus-per-node", "0"])
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    kind, nodes, gpus, file, name = told.err.splitlines()
    assert kind.startswith("error[config] --print: expected one of torchrun, slurm, kubernetes, skypilot; got 'slrm'.")
    assert kind.endswith("Did you mean `slurm`?")
    assert nodes.startswith("error[config] --nodes: expected a whole number from 1")
    assert gpus.startswith("error[config] --gpus-per-node: expected a whole number from 1")
    assert "expected a run file that can be read; got no such file" in file
    assert "without line breaks" in name


def test_launch_needs_no_torch(run_file):
    run = "import sys; from lengthwise.cli import main\ntry:\n    main(sys.argv[1:])\n"
    run += "finally:\n    print([name for name in ('torch', 'transformers') if name in sys.modules])"
    words = ["launch", "--print", "torchrun", str(run_file)]
    done = subprocess.run([sys.executable, "-W", "error", "-c", run, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert lines[0] == "#!/bin/bash"
    assert lines[-1].endswith(f"train {shlex.quote(str(run_file))} --resume-if-any")
