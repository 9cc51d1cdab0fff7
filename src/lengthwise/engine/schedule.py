"""The learning rate of each step: the schedules of `transformers.get_scheduler`, by its names.

A function of the step alone, so that a run that goes on has it, too. Step s of a run, counted from 1, has what
transformers' scheduler gives after s - 1 calls, as in its Trainer: the first step of a warm-up has learning rate 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.optimization import get_scheduler

from lengthwise.config import OptimizerConfig
from lengthwise.core.errors import ConfigError


def learning_rates(config: OptimizerConfig, num_steps: int) -> Callable[[int], float]:
    """Return what gives the learning rate of a step, counted from 1, in a run of `num_steps`."""
    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    args = {} if config.schedule_args is None else config.schedule_args.model_dump(exclude_none=True)
    steps = None if "num_stable_steps" in args else num_steps  # transformers warns of both
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)  # some schedules look its lr up
    scheduler: Any = get_scheduler(name, optimizer, config.warmup_steps, steps, args)
    (factor,) = scheduler.lr_lambdas
    return lambda step: config.lr * factor(step - 1)


def check_steps(config: OptimizerConfig, num_steps: int) -> None:
    """Refuse a schedule whose parts are longer than a run of `num_steps`.

    Raises:
        ConfigError: they are.
    """
    args = config.schedule_args
    if config.schedule != "warmup_stable_decay" or args is None or args.num_stable_steps is not None:
        return
    decay = args.num_decay_steps or 0
    if config.warmup_steps + decay > num_steps:
        expected = f"at most the run's {num_steps} steps for warm-up and decay"
        got, remedy = f"{config.warmup_steps} and {decay}", "Shorten one of them, or give num_stable_steps."
        raise ConfigError("optimizer.schedule_args", expected=expected, got=got, remedy=remedy)
