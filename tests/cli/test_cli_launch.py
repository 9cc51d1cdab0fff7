"""`lengthwise launch --print`: files that parse, that a page shows as they are, and that train on two nodes."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

import lengthwise
import namespaces
from lengthwise.cli.launch_files import KINDS, TODO, Launched
from training.small_runs import call, losses, make_rows, write_run

ROOT = Path(__file__).parents[2]
OF_THE_PAGE = Launched(
    name="chat", run_file="chat.yaml", output="s3://bucket/chat", nodes=2, gpus=8, max_restarts=3, on_cpu=False
)


def printed(capsys, path, kind, *options):
    assert call("launch", path, "--print", kind, *options) == 0
    said = capsys.readouterr()
    return said.out, said.err


@pytest.fixture
def path(tmp_path):
    return write_run(tmp_path, make_rows([30, 12, 5, 60]), checkpoint={"every_steps": 1}, device="cpu")


def commands(text):
    """The torchrun commands in a text, without what continues a line."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [match[0].split() for match in re.finditer(r"torchrun -.*", joined)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_parses(path, kind, capsys):
    out, err = printed(capsys, path, kind, "--nodes", "3", "--gpus-per-node", "4")
    assert TODO in out
    assert f"with {TODO}" in err
    found = yaml.safe_load(out) if kind in ("kubernetes", "skypilot") else {}
    if kind == "kubernetes":
        kinds = found["spec"]["pytorchReplicaSpecs"]
        assert [each["replicas"] for each in kinds.values()] == [1, 2]
        assert found["spec"]["nprocPerNode"] == "4"
        (container,) = kinds["Worker"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") is None, "a run on CPUs"
        command = container["command"]
    else:
        shell = found["run"] if kind == "skypilot" else out
        assert subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True).stderr == ""
        (command,) = commands(shell)
    given = [re.sub(r"\$\w+|\"", "1", word) for word in command[1:] if word != "&"]
    asked = get_args_parser().parse_args(given)
    assert (asked.module, asked.training_script, asked.training_script_args[0]) == (True, "lengthwise", "train")
    assert asked.training_script_args[1:] == [str(path), "--resume-if-any"]
    if kind != "kubernetes":
        assert (str(asked.max_restarts), asked.nproc_per_node) == ("3", "4")


def test_one_machine_needs_no_workers_and_gpus_are_asked_for(path, capsys):
    out, _ = printed(capsys, path, "kubernetes", "--nodes", "1")
    assert list(yaml.safe_load(out)["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    asked = yaml.safe_load(KINDS["kubernetes"](OF_THE_PAGE))["spec"]["pytorchReplicaSpecs"]["Master"]
    assert asked["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_with_spaces_and_commas_stays_one_argument(kind):
    name = "two words, it's: #1.yaml"
    out = KINDS[kind](replace(OF_THE_PAGE, run_file=name))
    if kind == "kubernetes":
        replicas = yaml.safe_load(out)["spec"]["pytorchReplicaSpecs"]["Master"]
        words = replicas["template"]["spec"]["containers"][0]["command"]
    else:
        shell = yaml.safe_load(out)["run"] if kind == "skypilot" else out
        (line,) = re.findall(r"torchrun -.*", re.sub(r"\\\n\s*", "", shell))
        words = shlex.split(line.removesuffix("&"))
    assert words[words.index("train") + 1] == name


def test_ranks_have_as_long_to_commit_as_the_pod_gives_them():
    spec = yaml.safe_load(KINDS["kubernetes"](OF_THE_PAGE))["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    given = {each["name"]: each["value"] for each in spec["containers"][0]["env"]}
    assert 30 < int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < spec["terminationGracePeriodSeconds"]


def test_all_that_is_wrong_is_told_before_anything_is_printed(tmp_path, capsys):
    path = write_run(tmp_path, make_rows([3]), learning_rate=1)
    assert call("launch", path, "--print", "slurm", "--nodes", "0", "--gpus-per-node", "0") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(each in said.err for each in ("learning_rate", "--nodes", "--gpus-per-node"))


def test_nothing_heavy_is_imported(path):
    code = f"import sys; sys.argv[1:] = ['launch', {str(path)!r}, '--print', 'slurm']\n"
    code += "from lengthwise.cli import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_page_shows_what_is_printed():
    page = (ROOT / "docs" / "launch.md").read_text()
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown == [make(OF_THE_PAGE) for make in KINDS.values()]


@pytest.mark.skipif(
    not namespaces.can_make_namespaces(), reason="namespaces need root, ip and tc, and a kernel's leave"
)
def test_two_nodes_train_as_one_process_does(path, tmp_path, capsys):
    """Each in a network of its own, started by what was printed; then both again, as a cluster would."""
    out, _ = printed(capsys, path, "torchrun", "--nodes", "2", "--gpus-per-node", "1")

    def started(nodes, node):
        script = out.replace(f"HEAD={TODO}", "HEAD=10.213.0.1").replace(f"NODE={TODO}", f"NODE={node}")
        script = script.replace("torchrun --nnodes", f"{sys.executable} -m torch.distributed.run --nnodes")

        def enter():
            nodes.enter(node)

        return subprocess.Popen(
            ["bash", "-c", script],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
            preexec_fn=enter,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with namespaces.shaped_nodes(2, 1e8) as nodes:
        processes = [started(nodes, node) for node in range(2)]
        try:
            said = [each.communicate(timeout=120)[0] for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait()
    assert [each.returncode for each in processes] == [0, 0], said
    lengthwise.train(path, ranks=1, overrides=["output=alone", "capacity_tokens=64"])
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
