"""Runs with each optimizer: the training of one plain process, and gone on with as if nothing had been."""

import json
import shutil

import pytest
import torch

import lengthwise
from engine.optimizer_cases import CASES, keys_of, plain_optimizer
from run.small_runs import call, losses, make_rows, plain_model, plain_training, relative, steps_of
from run.test_run_resume import LENGTHS, assert_equal_runs, broken_off, run_of, whole
from tiers import some

TRAINED = ("adam", "sgd momentum", "lion")


def test_every_optimizer_is_trained_with():
    """AdamW in all other tests."""
    assert {case.split()[0] for case in (*TRAINED, "adamw")} == {case.split()[0] for case in CASES}


@pytest.mark.parametrize("case", some(TRAINED, 0))
def test_run_is_that_of_one_process_and_goes_on_on_any_ranks(tmp_path, case):
    keys = {"lr": 2e-3, "schedule": "linear", "max_grad_norm": 0.5}
    path = run_of(tmp_path, optimizer=keys_of(case, **keys), capacity_tokens=48)
    wanted = whole(path, ranks=2)
    expected, _, model = plain_training(
        tmp_path / "model", make_rows(LENGTHS), steps_of(wanted), dtype=torch.float64,
        lrs=[2e-3 * (7 - step) / 7 for step in range(7)], max_grad_norm=0.5,
        make=lambda groups: plain_optimizer(case, [each for group in groups for each in group["params"]]),
    )  # fmt: skip
    assert max(relative(got, loss) for got, loss in zip(losses(wanted), expected, strict=True)) < 1e-10
    trained = dict(plain_model(wanted / "model", torch.float64).named_parameters())
    for name, parameter in model.named_parameters():
        assert (trained[name] - parameter).abs().max() < 1e-8, name
    broken_off(path, 2, after=5)
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    lengthwise.train(path, ranks=2, resume=True)
    assert_equal_runs(tmp_path / "out", wanted)
    lengthwise.train(path, ranks=3, resume=True, overrides=["output=other"])
    assert_equal_runs(tmp_path / "other", wanted, exactly=False)


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path, capsys):
    path = run_of(tmp_path)
    broken_off(path, 1, after=3)
    manifest = json.loads((tmp_path / "out/checkpoints/step-000002/manifest.json").read_text())
    assert manifest["run"]["optimizer"]["name"] == "adamw"
    capsys.readouterr()
    assert call("train", path, "--resume", "--set", "optimizer={name: adam}") == 2
    assert "optimizer.name: 'adamw' (text) then, 'adam' (text) now" in " ".join(capsys.readouterr().err.split())


@pytest.mark.exhaustive
def test_a_run_that_goes_on_checks_its_memory_too(tmp_path):
    path = run_of(tmp_path, memory_check=True)
    wanted = whole(path, ranks=2)
    broken_off(path, 2, after=5)
    lengthwise.train(path, ranks=2, resume=True)
    assert_equal_runs(tmp_path / "out", wanted)
