"""Who writes at a URL: living, gone and replaced owners, machines that share nothing, and what is refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import fsspec
import pytest

import lengthwise
from lengthwise.core.errors import ConfigError, LengthwiseError, OutputError
from lengthwise.core.faults import VARIABLE
from lengthwise.core.remote import RemoteFolder, without_secrets
from lengthwise.training import marker
from lengthwise.training.callbacks import Callback
from lengthwise.training.run_files import RunFiles
from training import stores
from training.small_runs import Command, call, count_lines, losses
from training.test_training_remote import at_url, steady, vanish
from training.test_training_resume import assert_equal_runs, run_of, whole


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(marker, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(marker, "WATCH_SECONDS", 1.5)
    return stores.register(tmp_path, monkeypatch)


def another_machine(tmp_path, monkeypatch, name="b"):
    """Take the place of a machine with a disk and a start of its own."""
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / f"cache-{name}"))
    monkeypatch.setattr(marker, "_boot", lambda: name)


def test_another_machine_is_refused_while_a_run_lives_and_takes_over_once_it_is_gone(tmp_path, monkeypatch, capfd, url):
    path, there = run_of(tmp_path, output=url, steps=500), tmp_path / "there"
    command = Command("train", path, "--ranks", 2)
    command.wait_for(lambda: at_url(there))
    another_machine(tmp_path, monkeypatch)
    for option in ("--resume", "--overwrite"):
        assert call("train", path, option) == 2
        assert f"got one that process {command.pid} on " in capfd.readouterr().err
    command.send(signal.SIGKILL, group=True)
    command.wait_for(lambda: command.ended() or True)
    command.kill()
    assert call("train", path, "--resume", "--set", "steps=500", "checkpoint.every_steps=100") == 0
    assert "waiting 2 s for a sign of life" in capfd.readouterr().out
    assert len(losses(there)) == 500


def test_a_killed_run_of_this_machine_is_followed_at_once(tmp_path, monkeypatch, url):
    path = run_of(tmp_path, output=url)
    monkeypatch.setattr(marker, "WATCH_SECONDS", 1e6)
    command = Command("train", path, "--ranks", 2)
    command.wait_for(lambda: count_lines(stores.here(url) / "metrics.jsonl") >= 3)
    command.send(signal.SIGKILL, group=True)
    time.sleep(0.1)
    command.kill()
    command.finish()
    lengthwise.train(path, overwrite=True)
    assert at_url(tmp_path / "there")[-1] == 7


class Replaces(Callback):
    """Another run takes the URL over."""

    def __init__(self, there):
        self._marker = there / "running.json"

    def on_step(self, step):
        if step.metrics.step == 3:
            found = json.loads(self._marker.read_text())
            self._marker.write_text(json.dumps({**found, "owner": "0" * 32}))


def test_a_run_that_was_replaced_ends_before_it_commits_again(tmp_path, url):
    there = tmp_path / "there"
    path = run_of(tmp_path, output=url, steps=50)
    with pytest.raises(LengthwiseError, match="another run has taken the URL over"):
        lengthwise.train(path, callbacks=[Replaces(there)])
    assert [step for step in at_url(there) if step > 4] == []
    assert json.loads((there / "running.json").read_text())["owner"] == "0" * 32
    assert not (there / "model").exists()


def test_a_url_that_holds_a_run_is_refused_and_overwritten_when_asked(tmp_path, url):
    path, there = run_of(tmp_path, output=url), tmp_path / "there"
    lengthwise.train(path)
    (there / "notes.txt").write_text("mine")
    before = (there / "metrics.jsonl").read_bytes()
    with pytest.raises(OutputError, match=r"expected no run at the output's URL; got checkpoints, config.yaml"):
        lengthwise.train(path)
    assert (there / "metrics.jsonl").read_bytes() == before
    lengthwise.train(path, overwrite=True, overrides=["steps=3"])
    assert len(losses(there)) == len(list((there / "plans").iterdir())) == 3
    assert at_url(there) == [2, 3]
    assert (there / "notes.txt").read_text() == "mine"


def test_what_another_machine_did_since_counts(tmp_path, monkeypatch, url):
    """A goes to step 4, B goes on to step 7; A, whose disk still has its own, goes on from there to 9."""
    path, there = run_of(tmp_path, output=url, steps=9), tmp_path / "there"
    wanted = whole(path)
    monkeypatch.setenv(VARIABLE, "update:0:6:error")
    with pytest.raises(LengthwiseError):
        lengthwise.train(path, ranks=2, callbacks=[steady(there, 2)])
    own = os.environ["LENGTHWISE_CACHE"]
    another_machine(tmp_path, monkeypatch)
    monkeypatch.setenv(VARIABLE, "update:0:8:error")
    with pytest.raises(LengthwiseError):
        lengthwise.train(path, ranks=2, resume=True, callbacks=[steady(there, 2)])
    monkeypatch.delenv(VARIABLE)
    newest = at_url(there)[-1]
    another_machine(tmp_path, monkeypatch, "a")
    monkeypatch.setenv("LENGTHWISE_CACHE", own)
    told = Told()
    lengthwise.train(path, ranks=2, resume=True, callbacks=[told])
    assert f"after step {newest}" in told.read(tmp_path)
    assert_equal_runs(there, wanted, exactly=False)


class Told(Callback):
    def on_note(self, line):
        with open(os.environ[stores.FAULTS] + "/told", "a") as file:
            file.write(line + "\n")

    def read(self, folder):
        return (folder / "faults/told").read_text()


def test_the_newest_of_this_machine_is_taken_and_copied(tmp_path, monkeypatch, url):
    """Step 6 is committed here, and not at the URL, when the rank dies."""
    path, there = run_of(tmp_path, output=url), tmp_path / "there"
    wanted = whole(path, ranks=2)
    monkeypatch.setenv(VARIABLE, "checkpoint-committed:0:6:kill")
    with pytest.raises(LengthwiseError, match="SIGKILL"):
        lengthwise.train(path, ranks=2, callbacks=[steady(there, 2)])
    monkeypatch.delenv(VARIABLE)
    assert 6 not in at_url(there)
    told = Told()
    lengthwise.train(path, ranks=2, resume=True, callbacks=[told])
    assert "after step 6" in told.read(tmp_path)
    assert "fetching" not in told.read(tmp_path)
    assert_equal_runs(there, wanted)


def test_a_file_url_with_ranks_and_memory_with_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / "cache"))
    path = run_of(tmp_path)
    wanted = whole(path, ranks=2)
    url = f"file://{tmp_path}/there"
    lengthwise.train(path, ranks=2, overrides=[f"output={url}"])
    vanish(url)
    lengthwise.train(path, ranks=2, resume=True, overrides=[f"output={url}"])
    assert_equal_runs(tmp_path / "there", wanted)
    assert not list((tmp_path / "there").rglob("*.unfinished"))
    url = f"memory://{tmp_path.name}/there"
    lengthwise.train(path, overrides=[f"output={url}", "steps=4"])
    vanish(url)
    lengthwise.train(path, resume=True, overrides=[f"output={url}", "steps=4"])
    fsspec.filesystem("memory").get(f"{tmp_path.name}/there/", str(tmp_path / "got/"), recursive=True)
    assert at_url(tmp_path / "got") == [2, 4]
    assert len(losses(tmp_path / "got")) == 4


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def on_machines(tmp_path, path, *options, fault="", machines=2):
    """Run one rank on each of so many machines, with disks of their own; return their exit statuses and outputs."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "RANK"))}
    port, started = free_port(), []
    for number in range(machines):
        place = ["--nnodes", machines, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, place), "--nproc-per-node", "1"]
        command += ["-m", "lengthwise", "train", str(path), "--timeout-seconds", "20", *options]
        cache = {"LENGTHWISE_CACHE": str(tmp_path / f"machine-{number}"), VARIABLE: fault, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                command, env={**outside, **cache}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return [(each.communicate(timeout=100)[0], each.returncode) for each in started]


def test_machines_that_share_nothing_commit_one_checkpoint_and_go_on(tmp_path):
    """A rank dies; the run goes on from the URL on new disks, on two machines and on one."""
    slow = ",".join(f"microbatches:0:{step}:sleep" for step in (3, 4, 5))  # until the first checkpoint is there
    path = run_of(tmp_path, output=f"file://{tmp_path}/there")
    wanted, there = whole(path, ranks=2), tmp_path / "there"
    for machine, status in on_machines(tmp_path, path, fault=f"{slow},update:1:6:kill"):
        assert status != 0, machine
    assert 2 in at_url(there)
    own = [
        sorted(each.name for each in tmp_path.glob(f"machine-{number}/output/*/*/checkpoints/*2/*"))
        for number in (0, 1)
    ]
    assert own == [["manifest.json", f"rank-0000{number}.safetensors"] for number in (0, 1)]
    shutil.copytree(there, tmp_path / "kept")
    for number in (0, 1):
        shutil.rmtree(tmp_path / f"machine-{number}")
    outputs = on_machines(tmp_path, path, "--resume")
    assert [status for _, status in outputs] == [0, 0], outputs
    assert "fetching 2 files" in outputs[0][0]
    assert_equal_runs(there, wanted)
    assert call("checkpoint", "verify", there) == 0
    shutil.rmtree(there)
    shutil.move(tmp_path / "kept", there)
    lengthwise.train(path, resume=True)
    assert_equal_runs(there, wanted, exactly=False)


SECRETS = [
    "https://host/x?X-Amz-Signature=AAAA&b=1",
    "ftp://me:AAAA@host/x",
    "aws_secret_access_key='AAAA'",
    "Authorization: Bearer AAAA",
    '{"access_key": "AAAA", "token":"AAAA"}',
]


@pytest.mark.parametrize("text", SECRETS)
def test_texts_of_stores_are_told_without_secrets(text):
    assert "AAAA" not in without_secrets(f"refused: {text} (403)")
    assert without_secrets(f"refused: {text} (403)").startswith("refused: ")


@pytest.mark.parametrize(("output", "said"), [
    ("s3://key:AAAA@bucket/run", "what may be a password"),
    ("memory://bucket/run?sig=AAAA", "what may be a password"),
    ("nosuch://bucket/run", "Protocol not known: nosuch"),
    ("memory://", "names no folder"),
    ("s3:/bucket/run", "one slash"),
    ("memory://a/../b", "names no folder"),
    ("simplecache::memory://a", "names no store"),
])  # fmt: skip
def test_urls_that_cannot_be_are_refused_before_anything_starts(tmp_path, output, said):
    path = run_of(tmp_path, output=output)
    with pytest.raises(ConfigError) as caught:
        lengthwise.train(path)
    assert said in str(caught.value)
    assert "AAAA" not in str(caught.value)


def test_a_store_that_cannot_be_written_is_told_before_training(tmp_path, capsys, url):
    stores.ask("fails", "1000 running.json")
    assert call("train", run_of(tmp_path, output=url)) == 2
    told = capsys.readouterr().err
    assert f"{url}: expected a store that can be written" in told
    assert stores.SECRET not in told


def best_of(folder, step, content):
    shutil.rmtree(folder / "model-best", ignore_errors=True)
    (folder / "model-best").mkdir(parents=True)
    (folder / "model-best/evaluation.json").write_text(json.dumps({"step": step, "loss": 1.0 / step, "data": "d"}))
    for name in ("config.json", "model.safetensors"):
        (folder / "model-best" / name).write_bytes(content)


def test_the_best_model_stays_until_a_better_one_is_whole(tmp_path, url):
    files, best = RunFiles(RemoteFolder(url), tmp_path / "run", 1e9), tmp_path / "there/model-best"
    best_of(tmp_path / "run", 2, b"two")
    files.copy()
    best_of(tmp_path / "run", 4, b"four")
    for name in ("model.safetensors", "config.json", "evaluation.json"):
        stores.ask("fails", f"1 step-000004/{name}")
        with pytest.raises(OSError, match=name):
            files.copy()
        assert (best / "step-000002/model.safetensors").read_bytes() == b"two"
        assert not (best / "step-000004/evaluation.json").exists()
    files.copy()
    assert [each.name for each in best.iterdir() if list(each.iterdir())] == ["step-000004"]
    assert (best / "step-000004/model.safetensors").read_bytes() == b"four"


def test_the_best_model_is_known_on_another_machine(tmp_path, url):
    """The evaluation of before stays the best where those that follow are worse."""
    keys = {"eval": {"data": [{"path": "train.jsonl"}], "every_steps": 2}, "save": {}}
    path, there = run_of(tmp_path, output=url, steps=4, **keys), tmp_path / "there"
    lengthwise.train(path)
    (note,) = there.glob("model-best/*/evaluation.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "loss": 0.001}))
    vanish(url)
    lengthwise.train(path, resume=True, accept_changes=True, overrides=["steps=6"])
    assert list(there.glob("model-best/*/evaluation.json")) == [note]
    assert note.with_name("model.safetensors").exists()
