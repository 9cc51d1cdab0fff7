"""Runs whose output is a URL: what is there, when it fails, and going on from the URL alone on another machine."""

import re
import shutil
import signal
import time

import pytest

import lengthwise
from lengthwise.core.faults import VARIABLE
from lengthwise.training import marker, mirror
from lengthwise.training.callbacks import Callback
from training import stores
from training.small_runs import Command, call, count_lines, losses, read_lines
from training.test_training_resume import EVERY, assert_equal_runs, run_of, whole


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = run_of(tmp_path_factory.mktemp("whole"))
    return {ranks: whole(path, ranks=ranks, overwrite=True) and copied(path, ranks) for ranks in (1, 2)}


def copied(path, ranks):
    return shutil.copytree(path.parent / "whole", path.parent / f"whole-{ranks}")


@pytest.fixture
def url(tmp_path, monkeypatch):
    return stores.register(tmp_path, monkeypatch)


def vanish(url):
    """The disk of the machine is gone."""
    shutil.rmtree(stores.here(url))


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_of_a_run_is_at_the_url(tmp_path, url, undisturbed, ranks):
    path = run_of(tmp_path, output=url)
    result = lengthwise.train(path, ranks=ranks)
    assert (result.url, result.folder) == (url, stores.here(url))
    assert_equal_runs(tmp_path / "there", undisturbed[ranks])
    names = sorted(each.name for each in (tmp_path / "there").iterdir())
    assert names == ["checkpoints", "config.yaml", "ledger.jsonl", "metrics.jsonl", "model", "plans", "running.json"]
    assert call("checkpoint", "verify", tmp_path / "there") == 0


class Waits(Callback):
    """Lets steps wait for what is copied meanwhile, to die at a known state of the URL: (after step, name) pairs."""

    def __init__(self, there, *names):
        self._there, self._names = there, names

    def on_step(self, step):
        for number, name in self._names:
            if number == step.metrics.step:
                end = time.monotonic() + 20
                while not (self._there / "checkpoints" / name).exists():
                    assert time.monotonic() < end, f"{name} never came"
                    time.sleep(0.01)


def steady(there, ranks):
    """The first checkpoint is there after step 5, and the second on its way."""
    part = f"rank-{ranks - 1:05d}.safetensors"
    return Waits(there, (3, f"step-000002/{part}"), (5, "step-000002/manifest.json"), (6, f"step-000004/{part}"))


def at_url(folder):
    return sorted(int(each.parent.name[5:]) for each in folder.glob("checkpoints/*/manifest.json"))


KILLS = {
    ("update", 0, 3): ([], [2]),  # copied while the next steps run: which step sees its end is open
    ("update", 1, 6): ([2], [2, 4]),
    ("checkpoint-rename", 0, 6): ([2], [2, 4]),
    ("upload", 0, 2): ([],),
    ("upload", 1, 4): ([2],),
    ("uploaded", 0, 4): ([2],),
    ("uploaded", 1, 4): ([2],),
    ("upload-manifest", 0, 4): ([2],),
    ("upload-committed", 0, 4): ([2, 4],),
}


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: "-".join(map(str, kill)))
def test_a_run_killed_anywhere_goes_on_from_the_url_alone(tmp_path, monkeypatch, url, undisturbed, kill):
    point, rank, step = kill
    path, there = run_of(tmp_path, output=url), tmp_path / "there"
    monkeypatch.setenv(VARIABLE, f"{point}:{rank}:{step}:kill")
    waits = [steady(there, 2)] if step > 3 else []
    with pytest.raises(lengthwise.LengthwiseError, match=rf"rank {rank}.*died \(signal SIGKILL\)"):
        lengthwise.train(path, ranks=2, callbacks=waits)
    monkeypatch.delenv(VARIABLE)
    resumes = bool(at_url(there))
    assert at_url(there) in KILLS[kill]
    vanish(url)
    lengthwise.train(path, ranks=2, resume=resumes, overwrite=not resumes)
    assert_equal_runs(there, undisturbed[2])
    assert call("checkpoint", "verify", there) == 0


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "ledger.jsonl", "manifest.json"])
def test_a_run_killed_in_the_middle_of_a_file_goes_on_from_the_url_alone(tmp_path, url, undisturbed, name):
    path, there = run_of(tmp_path, output=url), tmp_path / "there"
    lengthwise.train(path, ranks=2, callbacks=[steady(there, 2)], overrides=["steps=5"])
    stores.ask("slow", "0.1")
    command = Command("train", path, "--ranks", 2, "--resume", "--accept-changes")
    command.wait_for(lambda: list(stores.unfinished().glob(f"{name}.*")) and at_url(there))
    command.kill()
    command.finish()
    stores.ask("slow", "0")
    vanish(url)
    lengthwise.train(path, ranks=2, resume=True, accept_changes=True)
    assert_equal_runs(there, undisturbed[2])
    assert call("checkpoint", "verify", url) == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_goes_on_at_another_number_of_ranks(tmp_path, monkeypatch, url, undisturbed, ranks):
    path = run_of(tmp_path, output=url)
    monkeypatch.setenv(VARIABLE, "update:1:6:kill")
    with pytest.raises(lengthwise.LengthwiseError, match="SIGKILL"):
        lengthwise.train(path, ranks=2, callbacks=[steady(tmp_path / "there", 2)])
    monkeypatch.delenv(VARIABLE)
    vanish(url)
    lengthwise.train(path, ranks=ranks, resume=True)
    assert_equal_runs(tmp_path / "there", undisturbed[2], exactly=False)


def test_commands_on_a_url(tmp_path, capsys, url):
    path = run_of(tmp_path, output=url, eval={"data": [{"path": "train.jsonl"}], "every_steps": 2}, save={})
    assert call("train", path) == 0
    assert f"copied  to {url}: all of it" in capsys.readouterr().out
    vanish(url)
    assert call("checkpoint", "list", url) == 0
    listed = capsys.readouterr().out
    assert "best evaluation: loss" in listed
    assert f"{url}/model-best/step-00000" in listed
    assert call("checkpoint", "verify", url, "--step", 7) == 0
    assert f"{url}/checkpoints/step-000007: whole" in capsys.readouterr().out
    assert call("checkpoint", "export", url, "--to", tmp_path / "exported") == 0
    assert f"{url}/checkpoints/step-000007 exported to" in capsys.readouterr().out
    ours, theirs = (
        (folder / "model.safetensors").read_bytes() for folder in (tmp_path / "exported", tmp_path / "there/model")
    )
    assert ours == theirs
    assert sorted(each.name for each in tmp_path.glob("exported*")) == ["exported"]
    assert not stores.here(url).exists()
    damage(tmp_path / "there/checkpoints/step-000007/rank-00000.safetensors")
    assert call("checkpoint", "verify", url) == 1
    assert "step-000007/rank-00000.safetensors: SHA-256" in capsys.readouterr().out


def damage(path):
    """Flip one bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("harm", "said"), [
    (damage, "SHA-256"),
    (lambda path: path.write_bytes(b"half"), "got 4 bytes"),
    (lambda path: damage(path.with_name("manifest.json")), "a checkpoint's manifest"),
], ids=["bit", "cut", "manifest"])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_at_the_url_is_named_and_passed_over(tmp_path, capfd, url, undisturbed, harm, said, ranks):
    path, there = run_of(tmp_path, output=url), tmp_path / "there"
    lengthwise.train(path, ranks=ranks, callbacks=[steady(there, ranks)])
    harm(there / "checkpoints/step-000007/rank-00000.safetensors")
    vanish(url)
    assert call("train", path, "--ranks", ranks, "--resume") == 0
    out = capfd.readouterr().out
    assert re.search(rf"passed over.*{url}/checkpoints/step-000007.*{said}", out)
    assert re.search("going on from .*, after step [246]", out)
    assert_equal_runs(there, undisturbed[ranks])
    assert call("checkpoint", "verify", url) == 0


@pytest.fixture
def impatient(monkeypatch):
    """Waits between tries and for signs of life are short."""
    monkeypatch.setattr(mirror, "_BETWEEN_TRIES_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(mirror, "_AT_THE_END_SECONDS", 0.01)
    monkeypatch.setattr(marker, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(marker, "WATCH_SECONDS", 2.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ["rank-00001", "metrics", "manifest", "model/"])
def test_a_copy_that_fails_is_told_and_tried_again(tmp_path, capfd, url, undisturbed, what):
    path = run_of(tmp_path, output=url)
    stores.ask("fails", f"2 {what}")
    assert call("train", path, "--ranks", 2) == 0
    out = capfd.readouterr().out
    assert out.count(f"not copied to {url} yet, tried again in 0 s: ") == 2
    assert ("checkpoint of step 2: rank 1: OSError: " in out) == (what == "rank-00001")
    assert_equal_runs(tmp_path / "there", undisturbed[2])
    assert at_url(tmp_path / "there")[-1] == 7
    if what == "rank-00001":
        failures = [row["upload_failures"] for row in read_lines(tmp_path / "there/metrics.jsonl")]
        assert failures[0] == 0
        assert failures == sorted(failures)


@pytest.mark.usefixtures("impatient")
def test_the_third_failure_in_a_row_ends_the_run_and_the_machine_has_all(tmp_path, capfd, url, undisturbed):
    path = run_of(tmp_path, output=url)
    stores.ask("fails", "1000 rank-00000")
    assert call("train", path) == 1
    said = capfd.readouterr()
    assert said.out.count("not copied to") == 2
    assert f"error[output] {url}: expected one of 3 copies to succeed" in said.err
    assert f"All is whole in {stores.here(url)}" in said.err
    assert stores.SECRET not in said.out + said.err
    assert at_url(tmp_path / "there") == []
    stores.ask("fails", "")
    assert call("train", path, "--resume") == 0
    assert_equal_runs(tmp_path / "there", undisturbed[1])
    assert call("checkpoint", "verify", url) == 0


@pytest.mark.usefixtures("impatient")
def test_a_store_that_keeps_half_of_a_file_has_failed(tmp_path, capfd, url):
    stores.ask("cuts", "rank-00000")
    assert call("train", run_of(tmp_path, output=url)) == 1
    assert re.search(r"rank-00000.safetensors: \d+ bytes are there of \d+", capfd.readouterr().err)
    assert at_url(tmp_path / "there") == []


@pytest.mark.parametrize("keep_last", [1, 3])
def test_a_slow_store_holds_no_step_up_and_gets_the_newest(tmp_path, url, keep_last):
    checkpoint = {"every_steps": 1, "keep_last": keep_last}
    path, there = run_of(tmp_path, output=url, checkpoint=checkpoint, steps=12), tmp_path / "there"
    stores.ask("closed", "rank-")
    lengthwise.train(path, ranks=2, callbacks=[OpensAt(12, there)])
    assert at_url(there)[-1] == 12
    assert len(at_url(there)) <= 2
    assert call("checkpoint", "verify", url) == 0


class OpensAt(Callback):
    """Lets no checkpoint be copied before the end of a step."""

    def __init__(self, step, there):
        self._step, self._there = step, there

    def on_step(self, step):
        if step.metrics.step == self._step:
            assert at_url(self._there) == []
            stores.ask("closed", "")


def test_the_newest_are_kept(tmp_path, url):
    path = run_of(tmp_path, output=url, checkpoint={**EVERY, "keep_last": 2})
    lengthwise.train(path, callbacks=[steady(tmp_path / "there", 1)])
    there = sorted(each.name for each in (tmp_path / "there/checkpoints").iterdir())
    assert len(there) == 2
    assert there[-1] == "step-000007"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_asked_to_end_is_at_the_url_before_it_does(tmp_path, url, ranks):
    path, there = run_of(tmp_path, output=url, steps=500), tmp_path / "there"
    stores.ask("slow", "0.02")
    command = Command("train", path, "--ranks", ranks)
    command.wait_for(lambda: count_lines(stores.here(url) / "metrics.jsonl") >= 3)
    command.send(signal.SIGTERM)
    status, out, errors = command.finish()
    assert (status, errors) == (0, "")
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", out)[1])
    assert f"copying what is not there yet to {url}" in out
    assert f"all of the run is at {url}" in out
    assert at_url(there)[-1] == step
    assert (there / "model/config.json").exists()
    assert len(losses(there)) == step


def test_a_second_signal_ends_a_run_whose_store_hangs_and_says_what_is_there(tmp_path, monkeypatch, url):
    monkeypatch.setattr(marker, "_LAST_SECONDS", 0.5)
    path = run_of(tmp_path, output=url, steps=500)
    command = Command("train", path, "--ranks", 2)
    command.wait_for(lambda: at_url(tmp_path / "there"))
    stores.ask("closed", "/")
    command.send(signal.SIGTERM)
    command.wait_for(lambda: "copying what is not there yet" in command.written()[0])
    time.sleep(0.2)
    command.send(signal.SIGTERM)
    status, _, errors = command.finish()
    assert status == 130
    assert re.search(
        rf"the model is saved in {stores.here(url)}/model; the checkpoint after step \d+ is the newest at {url}", errors
    )
