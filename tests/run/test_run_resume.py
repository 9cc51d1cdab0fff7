"""Runs that go on from a checkpoint: the same to the bit on as many ranks, to rounding on others; what may change."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from testing.saved import whole_state
from testing.small import make_rows
from transformers import AutoModelForCausalLM

import lengthwise
from checkpoint.test_checkpoint_parts import flip
from lengthwise.checkpoint import writer
from lengthwise.config import RunConfig, load_config
from lengthwise.core.errors import OutputError
from lengthwise.run.callbacks import Callback
from lengthwise.run.resume import FREE_SETTINGS
from lengthwise.session import Session
from run.small_runs import (
    FailsAfter,
    assert_equal_runs,
    broken_off,
    call,
    losses,
    read_lines,
    told,
    whole,
    write_rows,
    write_run,
)
from tiers import more

PAGE = (Path(__file__).parents[2] / "docs" / "run-file.md").read_text(encoding="utf-8")
LENGTHS = [30, 12, 5, 60, 1, 2, 33]
EVERY = {"every_steps": 2, "background": False}


def run_of(folder, **keys):
    return write_run(folder, make_rows(LENGTHS), **{"steps": 7, "capacity_tokens": 64, "checkpoint": EVERY, **keys})


@pytest.mark.parametrize(("before", "after"), [(2, 4), more(3, 1)])
def test_a_run_goes_on_at_any_number_of_ranks(tmp_path, broken, before, after):
    wanted = whole(broken, ranks=before)
    if before != 2:
        broken = run_of(tmp_path / "other")
        broken_off(broken, before, after=5)
    result = lengthwise.train(broken, ranks=after, resume=True)
    assert result.steps == 7
    assert result.first_loss == losses(wanted)[0]
    assert_equal_runs(broken.parent / "out", wanted, exactly=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keys", [
    {"precision": "bf16", "lora": {"r": 4}, "eval": {"data": [{"path": "train.jsonl"}], "every_steps": 3}},
    {"precision": "fp32", "overlap": True},
], ids=str)  # fmt: skip
def test_a_run_that_went_on_is_the_same_to_the_bit(tmp_path, keys):
    path = run_of(tmp_path, **keys)
    wanted = whole(path, ranks=2)
    broken_off(path, 2, after=5)
    lengthwise.train(path, ranks=2, resume=True)
    assert_equal_runs(tmp_path / "out", wanted)
    if "eval" in keys:
        assert read_lines(tmp_path / "out/eval.jsonl") == read_lines(wanted / "eval.jsonl")


def test_learning_rates_after_a_resume_are_those_of_a_whole_run_and_the_newest_checkpoints_are_kept(tmp_path):
    args = {"num_decay_steps": 3, "decay_type": "1-sqrt", "min_lr_ratio": 0.25}
    keys = {"lr": 1e-3, "schedule": "warmup_stable_decay", "warmup_steps": 3, "schedule_args": args}
    path = run_of(tmp_path, optimizer=keys, checkpoint={**EVERY, "every_steps": 1, "keep_last": 2})
    wanted = whole(path)
    broken_off(path, 1, after=5)
    lengthwise.train(path, resume=True)
    assert sorted(each.name for each in (tmp_path / "out/checkpoints").iterdir()) == ["step-000006", "step-000007"]
    found, expected = ([row["lr"] for row in read_lines(each / "metrics.jsonl")] for each in (tmp_path / "out", wanted))
    assert found == expected
    assert len(set(found)) == 6, "up, flat and down"


@pytest.mark.parametrize(("epochs", "keys", "after"), [(2, {"sequences": 3}, 4), more(3, {"tokens": 64}, 6)], ids=str)
def test_no_sequence_is_taken_twice_or_left_out(tmp_path, epochs, keys, after):
    """Two faults in one run, at the border of an epoch too; 3 steps an epoch by sequences."""
    path = run_of(tmp_path, steps=None, epochs=epochs, global_batch=keys, checkpoint={**EVERY, "every_steps": 1})
    wanted = whole(path)
    for last in (2, after):
        with pytest.raises(lengthwise.LengthwiseError, match="Fault"):
            lengthwise.train(path, callbacks=[FailsAfter(last)], resume=last != 2)
    lengthwise.train(path, resume=True)
    assert_equal_runs(tmp_path / "out", wanted)


def test_a_run_that_is_asked_to_stop_at_a_steps_end_begins_no_other(tmp_path):
    """Asked after the ranks have shared the step's numbers, that is, while its metrics are written."""

    class Stops(Callback):
        def on_step(self, step):
            if step.metrics.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    result = lengthwise.train(run_of(tmp_path, steps=9, checkpoint={"every_steps": 0}), callbacks=[Stops()])
    assert (result.steps, result.stopped_by) == (2, signal.SIGTERM)
    assert [each.name for each in (tmp_path / "out/checkpoints").iterdir()] == ["step-000002"]


def test_a_loop_of_ones_own_goes_on_from_a_checkpoint_of_a_run(broken, tmp_path):
    """Its optimizer has the run's groups: matrices, which decay, and vectors."""
    config, folder = load_config(broken), broken.parent / "out/checkpoints/step-000004"
    assert call("checkpoint", "export", broken.parent / "out", tmp_path / "model", "--step", 4) == 0
    wanted = load_file(tmp_path / "model/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float64)
    matrices, vectors = ([each for each in model.parameters() if (each.dim() < 2) == few] for few in (False, True))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1.0)
    with Session(model, optimizer, capacity_tokens=64) as session:
        session.load(folder)
        state = whole_state(session)
        assert session.steps == 4
    assert all(torch.equal(each, wanted[name]) for name, each in state["master_weights"].items())
    assert all(each["step"] == 4 and each["exp_avg"].any() for each in state["state"].values())
    first, second = state["param_groups"]
    assert (first["lr"], first["weight_decay"]) == (config.optimizer.lr, config.optimizer.weight_decay)
    assert (second["lr"], second["weight_decay"]) == (config.optimizer.lr, 0.0)


def contents(folder):
    return {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_damaged_file_is_named_before_anything_changes(broken, capsys):
    flip(broken.parent / "out/checkpoints/step-000004/rank-00001.safetensors", -1)
    before = contents(broken.parent / "out")
    capsys.readouterr()
    assert call("train", broken, "--ranks", 3, "--resume") == 2
    told = capsys.readouterr().err
    assert "SHA-256" in told
    assert "step-000004/rank-00001" in told
    assert contents(broken.parent / "out") == before


def test_a_file_that_lost_lines_is_named_before_anything_changes_and_can_be_accepted(broken, capsys):
    metrics = broken.parent / "out/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    before = contents(broken.parent / "out")
    capsys.readouterr()
    assert call("train", broken, "--resume") == 2
    assert f"{metrics}: expected the lines up to step 4" in capsys.readouterr().err
    assert contents(broken.parent / "out") == before
    assert call("train", broken, "--resume", "--accept-changes") == 0
    assert "metrics.jsonl: 2 lines of 4" in capsys.readouterr().out
    assert [row["step"] for row in read_lines(metrics)] == [1, 2, 5, 6, 7]


def other_tokens(folder):
    rows = make_rows(LENGTHS)
    rows[2]["input_ids"][0] ^= 1
    write_rows(folder / "train.jsonl", rows)


REFUSED = [
    (("--resume", "--overwrite"), ["expected --overwrite or --resume; got both"]),
    (("--accept-changes",), ["--resume beside --accept-changes"]),
    (("--resume", "--set", "output=nowhere"), ["a checkpoint to resume from"]),
    (
        ("--resume", "--set", "seed=1", "global_batch={tokens: 64}", "optimizer.lr=0.1", "planner=static", "steps=9"),
        ["seed: 0", "global_batch.", "optimizer.lr", "steps: 7", "--accept-changes"],
    ),
    (("--resume", "--set", "optimizer={name: adam}"), ["optimizer.name: 'adamw' (text) then, 'adam' (text) now"]),
    (("--resume", "--accept-changes", "--set", "optimizer={name: adam}"), ["states of adamw (exp_avg, exp_avg_sq)"]),
    (("--resume", "--accept-changes", "--set", "precision=fp32"), ["float64, not float32"]),
    (("--resume",), ["other data"]),
]


def test_what_a_run_cannot_go_on_with_is_refused_and_nothing_changes(broken, capsys):
    before = contents(broken.parent / "out")
    for arguments, words in REFUSED:
        if words == ["other data"]:
            other_tokens(broken.parent)
        capsys.readouterr()
        assert call("train", broken, *arguments) == 2, arguments
        told = " ".join(capsys.readouterr().err.split())
        assert [each for each in words if each not in told] == [], told
        assert "planner" not in told, "how fast, not what"
        assert contents(broken.parent / "out") == before
    assert not (broken.parent / "nowhere").exists()


def test_the_page_names_what_may_change():
    (passage,) = [text for text in PAGE.split("\n\n") if "takes the newest checkpoint" in text]
    assert set(re.findall(r"`(\w+)`", passage)) & set(RunConfig.model_fields) == FREE_SETTINGS


def test_a_broken_newest_is_passed_over_and_told(broken, capfd):
    file = broken.parent / "out/checkpoints/step-000004/rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert call("train", broken, "--ranks", 2, "--resume", "--accept-changes") == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "skipped and removed: error[output]" in told
    assert "step-000002, after step 2" in told
    assert "changed since" not in told
    assert_equal_runs(broken.parent / "out", whole(broken, ranks=2))


def test_a_failed_save_is_a_warning_and_the_third_in_a_row_an_error(tmp_path, monkeypatch, capsys):
    """Of five, the second fails, and then the last three."""
    path, saves, write = run_of(tmp_path, steps=5, checkpoint={**EVERY, "every_steps": 1}), [], writer.write_part

    def fail_at(numbers):
        def write_or_fail(folder, *part):
            saves.append(folder.name)
            if len(saves) in numbers:
                (folder / "rank-00000.safetensors").write_bytes(b"half")
                raise OSError(28, "No space left on device")
            write(folder, *part)

        monkeypatch.setattr(writer, "write_part", write_or_fail)

    fail_at({2})
    assert call("train", path) == 0
    assert "the checkpoint after step 2 was not written: OSError: [Errno 28] No space left" in capsys.readouterr().out
    names = sorted(each.name for each in (tmp_path / "out/checkpoints").iterdir())
    assert names == ["step-000003", "step-000004", "step-000005"]
    saves.clear()
    fail_at({3, 4, 5})
    with pytest.raises(OutputError, match="No space left"):
        lengthwise.train(path, overwrite=True)
    assert sorted(each.name for each in (tmp_path / "out/checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_a_job_that_is_started_again_goes_on_where_there_is_a_checkpoint(tmp_path, capsys):
    """It never deletes a model that was trained."""
    path = run_of(tmp_path)
    wanted = whole(path)
    broken_off(path, 1, after=1)
    assert not list((tmp_path / "out/checkpoints").glob("step-*")), "none was due yet"
    with pytest.raises(lengthwise.LengthwiseError, match="Fault"):
        lengthwise.train(path, resume="if_any", callbacks=[FailsAfter(5)])
    assert call("train", path, "--resume-if-any") == 0
    assert_equal_runs(tmp_path / "out", wanted)
    assert "resuming from" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "out/checkpoints").rename(tmp_path / "elsewhere")
    assert call("train", path, "--resume-if-any") == 2
    assert "no run in the output folder" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "out/model").exists()


ACCEPTING = ("--resume", "--accept-changes")
CHANGES = ["optimizer.lr=0.01", "optimizer.schedule=linear", "steps=9"]


def test_each_change_is_named_and_the_rest_of_the_run_obeys(broken, capfd):
    said = " ".join(told(capfd, "train", broken, "--ranks", 2, *ACCEPTING, "--set", *CHANGES).split())
    for each in (
        "optimizer.lr: 0.0003 (a number) then, 0.01 (a number) now",
        "optimizer.schedule: 'constant' (text) then",
        "steps: 7 (a whole number) then, 9 (a whole number) now",
    ):
        assert f"changed since the checkpoint: {each}" in said
    lrs = [3e-4] * 4 + [0.01 * (10 - step) / 9 for step in range(5, 10)]
    assert [row["lr"] for row in read_lines(broken.parent / "out/metrics.jsonl")] == pytest.approx(lrs, rel=1e-12)
    lengthwise.train(broken, ranks=1, resume=True, overrides=CHANGES)  # which are now the run's own


def test_a_run_that_ended_can_be_made_longer_and_not_shorter(tmp_path):
    path = run_of(tmp_path)
    wanted = whole(path)
    lengthwise.train(path, overrides=["steps=5"])
    with pytest.raises(OutputError, match="one after 5"):
        lengthwise.train(path, resume=True, accept_changes=True, overrides=["steps=3"])
    assert lengthwise.train(path, resume=True, accept_changes=True).steps == 7
    assert_equal_runs(tmp_path / "out", wanted)


def test_other_data_are_accepted_and_named(broken, capfd):
    write_rows(broken.parent / "train.jsonl", make_rows(LENGTHS, seed=5))
    said = " ".join(told(capfd, "train", broken, "--ranks", 2, *ACCEPTING).split())
    assert "changed since the checkpoint: the tokens of the data" in said
    assert len(losses(broken.parent / "out")) == 7


@pytest.mark.parametrize(("before", "change", "words"), [
    ({"optimizer": {"name": "sgd"}}, "optimizer.momentum=0.5", "states of sgd (none)"),
    ({"lora": {"r": 2}}, "seed=5", "expected seed 0, which may have drawn the frozen weights; got 5"),
])  # fmt: skip
def test_what_the_checkpoint_has_no_state_for_is_refused_all_the_same(tmp_path, capfd, before, change, words):
    path = run_of(tmp_path, **before)
    broken_off(path, 1, after=3)
    assert words in " ".join(told(capfd, "train", path, *ACCEPTING, "--set", change, status=2).split())
