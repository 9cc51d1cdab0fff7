"""The folder of a run: what is refused, one run at a time, and a model that is whole or not there."""

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lengthwise.config import load_config
from lengthwise.core.errors import OutputError
from lengthwise.training import trainer
from lengthwise.training.folder import RunFolder
from lengthwise.training.metrics import EvalMetrics
from training.small_runs import Command, call, count_lines, make_rows, write_run


def test_run_folder_refuses_a_file_and_a_run_and_names_them(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a file"):
        RunFolder(tmp_path / "file").check_free(overwrite=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name).write_text("")
    with pytest.raises(OutputError, match=r"config\.yaml, metrics\.jsonl"):
        RunFolder(tmp_path).check_free(overwrite=False)
    RunFolder(tmp_path).check_free(overwrite=True)
    RunFolder(tmp_path / "fresh").check_free(overwrite=False)


def test_run_folder_refuses_to_overwrite_an_input(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for name in ("model", "model/tokenizer", "link"):
        with pytest.raises(OutputError, match="input"):
            RunFolder(tmp_path).check_free(overwrite=True, inputs=[tmp_path / name])
    RunFolder(tmp_path).check_free(overwrite=True, inputs=[tmp_path / "model2", tmp_path])


def test_run_folder_line_is_json_that_any_reader_takes(tmp_path):
    """No NaN and no Infinity in a line: JSON has neither."""
    folder = RunFolder(tmp_path)
    row = {"step": 1, "loss": 1.5, "num_sequences": 2, "num_tokens": 9, "num_loss_tokens": 7}
    folder.on_eval(EvalMetrics(**row))
    assert json.loads((tmp_path / "eval.jsonl").read_text()) == row


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("arguments", [(), ("--overwrite",)])
def test_a_second_run_into_the_folder_of_a_living_one_is_refused(tmp_path, capfd, ranks, arguments):
    path = write_run(tmp_path, make_rows([30, 12]), steps=1_000_000)
    command = Command("train", path, "--ranks", ranks)
    command.wait_for(lambda: count_lines(tmp_path / "out/metrics.jsonl") >= 2)
    lines = count_lines(tmp_path / "out/metrics.jsonl")
    assert call("train", path, *arguments) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error[output] {tmp_path / 'out'}: expected a folder that no other run is writing; got one")
    assert f"process {command.pid} on {os.uname().nodename}" in err
    assert (err.count("\n"), "Traceback" in err) == (1, False)
    assert count_lines(tmp_path / "out/metrics.jsonl") >= lines, "nothing of the living run is deleted"
    command.send(signal.SIGTERM)
    assert command.finish()[0] == 0
    assert not (tmp_path / "out/run.lock").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_folder_of_a_killed_run_is_free(tmp_path, ranks):
    path = write_run(tmp_path, make_rows([30, 12]), steps=1_000_000)
    command = Command("train", path, "--ranks", ranks)
    command.wait_for(lambda: count_lines(tmp_path / "out/metrics.jsonl") >= 2)
    command.kill()
    assert command.finish()[0] == -signal.SIGKILL
    assert call("train", path, "--overwrite", "--set", "steps=1") == 0


def test_of_many_that_claim_a_folder_at_once_one_gets_it(tmp_path):
    """Again and again: claims end, and remove their lock, while others are being made."""
    together, got = threading.Barrier(4, timeout=20), []  # where two get it, others wait in vain
    (tmp_path / "out").mkdir()

    def claim(_):
        for round in range(50):
            together.wait()
            with contextlib.suppress(OutputError), RunFolder(tmp_path / "out").claimed(overwrite=False):
                got.append(round)
                assert len(os.listdir(tmp_path / "out")) == 1
                if round % 2:
                    together.wait()
                    continue
            if round % 2:
                together.wait()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(claim, range(4))) == [None] * 4
    assert sorted(set(got)) == list(range(50))
    assert all(got.count(round) == 1 for round in range(1, 50, 2)), "while one holds it, no other does"
    assert not os.listdir(tmp_path / "out")


def test_a_claim_under_which_nothing_was_written_leaves_nothing(tmp_path):
    with RunFolder(tmp_path / "a/b/out").claimed(overwrite=False):
        assert os.listdir(tmp_path / "a/b/out") == ["run.lock"]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_while_it_saves_leaves_no_model(tmp_path, monkeypatch, ranks):
    save = trainer.save_model

    def killed_halfway(model, folder):
        save(model, folder)
        (folder / "model.safetensors").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    path = write_run(tmp_path, make_rows([30, 12]))
    monkeypatch.setattr(trainer, "save_model", killed_halfway)
    command = Command("train", path, "--ranks", ranks)
    assert command.finish()[0] != 0
    assert not (tmp_path / "out/model").exists()
    assert (tmp_path / "out/model.unfinished").exists()
    monkeypatch.undo()
    assert call("train", path, "--overwrite") == 0
    assert (tmp_path / "out/model/model.safetensors").exists()
    assert not (tmp_path / "out/model.unfinished").exists()


def test_an_interrupt_says_whether_the_model_was_saved(tmp_path, monkeypatch, capfd):
    """Interrupted twice, before the model is there and after: what is said is what is true."""

    def interrupted(*_):
        raise KeyboardInterrupt

    path = write_run(tmp_path, make_rows([30, 12]))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_model", interrupted)
        assert call("train", path) == 130
    assert capfd.readouterr().err == "interrupted: nothing was saved\n"
    monkeypatch.setattr(trainer._Trainer, "close", interrupted)
    assert call("train", path, "--overwrite") == 130
    assert capfd.readouterr().err == f"interrupted: the model is saved in {tmp_path / 'out/model'}\n"
    assert (tmp_path / "out/model/model.safetensors").exists()


def test_a_saved_model_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A machine that loses power finds the whole model under `model`, or none."""
    config = load_config(write_run(tmp_path, make_rows([5, 6])))
    done = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def renamed(self, target):
        done.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with RunFolder(config.output).claimed(overwrite=False), RunFolder(config.output).saving() as unfinished:
        (unfinished / "a").write_text("x")
        (unfinished / "b").write_text("y")
    assert sorted(done[:2]) == ["a", "b"]
    assert done[2:] == ["model.unfinished", "rename to model", config.output.name]
