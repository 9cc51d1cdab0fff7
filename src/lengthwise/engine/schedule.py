"""Learning rates by step: the schedules of `transformers.get_scheduler`, by its names.

They depend on the step alone, so a resumed run needs no state. Step s of a run, counted from 1, has the learning rate
of transformers' scheduler after s - 1 calls, as in its Trainer. Only a warm-up differs: there the first step would have
learning rate 0, and a run of one step would train nothing. Step s of n steps of warm-up has the rate of s calls in a
warm-up of n + 1 instead, as in torchtitan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.optimization import get_scheduler

from lengthwise.config import OptimizerConfig
from lengthwise.core.errors import ConfigError


def learning_rates(config: OptimizerConfig, num_steps: int) -> Callable[[int], float]:
    """Return a function from a step, counted from 1, to its learning rate, in a run of `num_steps`."""
    rate, schedule = _settled(config)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    args = config.schedule_args or {}
    steps = None if "num_stable_steps" in args else num_steps  # transformers warns of both
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)  # some schedules look its lr up

    def factors(warmup: int) -> Callable[[int], float]:
        scheduler: Any = get_scheduler(name, optimizer, warmup, steps, args)
        return scheduler.lr_lambdas[0]

    warmup = warmup_steps(config, num_steps)
    rising, later = factors(warmup + 1), factors(warmup)
    return lambda step: rate * (rising(step) if step <= warmup else later(step - 1))


def warmup_steps(config: OptimizerConfig, num_steps: int) -> int:
    """Return the steps of warm-up in a run of `num_steps`; a share is rounded up, as in transformers."""
    asked = config.warmup_steps or 0
    return math.ceil(asked * num_steps) if isinstance(asked, float) else asked


def _settled(config: OptimizerConfig) -> tuple[float, str]:
    assert config.lr is not None, "run.checks fills it in"
    assert config.schedule is not None, "run.checks fills it in"
    return config.lr, config.schedule


def check_steps(config: OptimizerConfig, num_steps: int) -> None:
    """Check that a schedule gives learning rates in a run of `num_steps`, and that its parts fit into the run.

    Raises:
        ConfigError: it does not.
    """
    where, args = "optimizer.schedule_args", config.schedule_args or {}
    if config.schedule == "warmup_stable_decay" and "num_stable_steps" not in args:
        decay, warmup = args.get("num_decay_steps", 0), warmup_steps(config, num_steps)
        if isinstance(decay, int | float) and warmup + decay > num_steps:
            expected = f"at most the run's {num_steps} steps for warm-up and decay"
            got, remedy = f"{warmup} and {decay:g}", "Shorten one of them, or give num_stable_steps."
            raise ConfigError(where, expected=expected, got=got, remedy=remedy)
    try:
        rate = learning_rates(config, num_steps)
        rates = [rate(step) for step in {1, num_steps // 2 + 1, num_steps}]
        problem = None if all(0 <= each < math.inf for each in rates) else f"learning rates of {rates}"
    except (TypeError, ValueError, ArithmeticError) as error:
        problem = f"{error}"
    if problem is not None:
        expected = f"arguments with which schedule {config.schedule} gives a learning rate"
        raise ConfigError(where, expected=expected, got=problem, remedy="Change schedule_args.")
