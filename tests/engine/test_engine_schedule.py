"""Learning rates: those of transformers' schedulers, asked for by their names, at every step."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.optimization import get_scheduler

from lengthwise.config import OptimizerConfig
from lengthwise.config.optimizer import SCHEDULES
from lengthwise.core.errors import ConfigError
from lengthwise.engine.schedule import check_steps, learning_rates

ARGUMENTS = {
    "constant": [{}],
    "constant_with_warmup": [{}],
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 1.25}],
    "cosine_with_restarts": [{}, {"num_cycles": 3.0}],
    "cosine_with_min_lr": [{"min_lr": 1e-4}, {"min_lr_rate": 0.1}, {"min_lr_rate": 0.0, "num_cycles": 0.75}],
    "polynomial": [{}, {"lr_end": 1e-3, "power": 2.0}, {"power": 0.5}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "warmup_stable_decay": [
        {"num_decay_steps": 9},
        {"num_decay_steps": 5, "num_stable_steps": 4, "min_lr_ratio": 0.1, "decay_type": "linear"},
        {"num_decay_steps": 30, "num_stable_steps": 0, "decay_type": "1-sqrt", "warmup_type": "cosine"},
        {"num_decay_steps": 6, "warmup_type": "1-sqrt", "min_lr_ratio": 0.2, "num_cycles": 1.5},
    ],
}
CASES = [(name, args) for name, cases in ARGUMENTS.items() for args in cases]


def theirs(name, args, warmup, steps, lr):
    """The learning rates of a torch optimizer that transformers' scheduler leads, before each of its steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of both num_training_steps and num_stable_steps
        scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=args)
        found = []
        for step in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step + 1 < steps:  # after the last, polynomial without a step left to fall in divides by zero
                scheduler.step()
    return found


def ours(name, args, warmup, steps, lr):
    config = OptimizerConfig.model_validate(
        {"lr": lr, "schedule": name, "schedule_args": args or None, "warmup_steps": warmup}
    )
    check_steps(config, steps)
    rate = learning_rates(config, steps)
    return [rate(step) for step in range(1, steps + 1)]


def test_every_schedule_is_compared():
    assert set(ARGUMENTS) == set(SCHEDULES)
    assert {key for cases in ARGUMENTS.values() for args in cases for key in args} == {
        key for keys in SCHEDULES.values() for key in keys
    }


@pytest.mark.parametrize(("name", "args"), CASES, ids=str)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 30), (6, 30), (1, 12), (40, 30)])
def test_learning_rates_are_transformers_at_every_step(name, args, warmup, steps):
    if name == "warmup_stable_decay" and warmup == 40 and "num_stable_steps" not in args:
        pytest.skip("refused: the parts are longer than the run")
    # transformers' constant leaves warm-up out without a word
    there = "constant_with_warmup" if name == "constant" else name
    found = ours(name, args, warmup, steps, lr=4e-3)
    assert found == pytest.approx(theirs(there, args, warmup, steps, 4e-3), rel=1e-12, abs=1e-18)
    assert len(set(found)) > 1 or name == "constant" or not warmup


@given(st.sampled_from(CASES), st.integers(0, 20), st.integers(1, 60), st.floats(2e-3, 10.0))
def test_learning_rates_are_transformers_for_any_run(case, warmup, steps, lr):
    name, args = case
    if name == "constant":
        warmup = 0
    try:
        found = ours(name, args, warmup, steps, lr)
    except ConfigError:
        assert warmup + args["num_decay_steps"] > steps
        return
    assert found == pytest.approx(theirs(name, args, warmup, steps, lr), rel=1e-12, abs=1e-15)


def test_learning_rates_by_hand():
    linear, cosine, risen = (
        ours(*case, lr=8.0) for case in (("linear", {}, 0, 4), ("cosine", {}, 0, 4), ("constant_with_warmup", {}, 2, 4))
    )
    assert linear == [8, 6, 4, 2]
    assert cosine == pytest.approx([8, 8 * (0.5 + 0.5**1.5), 4, 8 * (0.5 - 0.5**1.5)])
    assert risen == [0, 4, 8, 8]
