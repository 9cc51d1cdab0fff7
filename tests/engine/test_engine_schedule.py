"""Learning rates: those of transformers' schedulers, asked for by their names, but above 0 in a warm-up."""

import pytest
import torch
from transformers.optimization import get_scheduler

from lengthwise.config import OptimizerConfig
from lengthwise.config.optimizer_config import SCHEDULES
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
        {"num_decay_steps": 5, "num_stable_steps": 4, "min_lr_ratio": 0.1, "decay_type": "linear"},
        {"num_decay_steps": 30, "num_stable_steps": 0, "decay_type": "1-sqrt", "warmup_type": "cosine"},
        {"num_decay_steps": 6, "warmup_type": "1-sqrt", "min_lr_ratio": 0.2, "num_cycles": 1.5},
    ],
}
CASES = [(name, args) for name, cases in ARGUMENTS.items() for args in cases]


def theirs(name, args, warmup, steps, lr):
    """The learning rates of a torch optimizer that transformers' scheduler leads, before each of its steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    name = "constant_with_warmup" if name == "constant" else name  # transformers' leaves warm-up out without a word
    of_run = None if "num_stable_steps" in args else steps
    scheduler = get_scheduler(name, optimizer, warmup, of_run, scheduler_specific_kwargs=args)
    found = scheduler.get_last_lr()
    for _ in range(steps - 1):
        optimizer.step()
        scheduler.step()
        found += scheduler.get_last_lr()
    return found


def test_every_schedule_is_compared():
    assert set(ARGUMENTS) == set(SCHEDULES)
    assert {key for cases in ARGUMENTS.values() for args in cases for key in args} == {
        key for keys in SCHEDULES.values() for key in keys
    }


@pytest.mark.parametrize(("name", "args"), CASES, ids=str)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 30), (6, 30), (12, 12)])
def test_learning_rates_are_transformers_and_a_warm_up_begins_above_0(name, args, warmup, steps):
    config = OptimizerConfig.model_validate(
        {"lr": 4e-3, "schedule": name, "schedule_args": args or None, "warmup_steps": warmup}
    )
    rate = learning_rates(config, steps)
    found = [rate(step) for step in range(1, steps + 1)]
    after = theirs(name, args, warmup, steps, 4e-3)[warmup:]
    assert found == theirs(name, args, warmup + 1, warmup + 1, 4e-3)[1:] + after
    assert len(set(found)) > 1 or name == "constant" or not warmup
    assert found[0] > 0
    assert 0 < learning_rates(config, 1)(1) < 4e-3 or not warmup, "a run of one step trains"


@pytest.mark.parametrize(
    ("schedule", "args", "expected"),
    [
        ("polynomial", {"power": "two"}, "gives a learning rate"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "steep"}, "decay type"),
        ("warmup_stable_decay", {"num_decay_steps": 30}, "at most the run's 20 steps"),
    ],
)
def test_arguments_that_give_no_learning_rate_are_refused_before_the_first_step(schedule, args, expected):
    config = OptimizerConfig.model_validate({"lr": 4e-3, "schedule": schedule, "schedule_args": args})
    with pytest.raises(ConfigError, match=expected):
        check_steps(config, 20)
