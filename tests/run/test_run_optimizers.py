"""Runs with each optimizer: the training of one plain process, and gone on with as if nothing had been."""

import pytest
import torch

import lengthwise
from engine.optimizer_cases import CASES, keys_of, plain_optimizer
from run.small_runs import (
    assert_equal_runs,
    broken_off,
    losses,
    make_rows,
    plain_model,
    plain_training,
    relative,
    steps_of,
    whole,
)
from run.test_run_resume import LENGTHS, run_of

TRAINED = ("adam", "sgd momentum", "lion")


@pytest.mark.exhaustive  # by the engine alone: tests/engine/test_engine_optimizers.py
@pytest.mark.parametrize("case", TRAINED)
def test_run_is_that_of_one_process_and_goes_on_to_the_same_bits(tmp_path, case):
    assert {each.split()[0] for each in (*TRAINED, "adamw")} == {each.split()[0] for each in CASES}
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
    lengthwise.train(path, ranks=2, resume=True)
    assert_equal_runs(tmp_path / "out", wanted)
