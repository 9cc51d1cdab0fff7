"""The learning rate of each step: the schedules of `transformers.get_scheduler`, by its names and formulas.

A function of the step alone, so that a run that goes on has it, too. Step s of a run, counted from 1, has what
transformers' scheduler gives after s - 1 calls, as in its Trainer: the first step of a warm-up has learning rate 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lengthwise.config import OptimizerConfig
from lengthwise.config.optimizer import POLYNOMIAL_END
from lengthwise.core.errors import ConfigError

_ENDLESS_TIMESCALE = 10_000  # of inverse_sqrt without warm-up


def learning_rates(config: OptimizerConfig, num_steps: int) -> Callable[[int], float]:
    """Return what gives the learning rate of a step, counted from 1, in a run of `num_steps`."""
    args = {} if config.schedule_args is None else config.schedule_args.model_dump(exclude_none=True)
    warmup, least = config.warmup_steps, _least(config, args)
    steps = num_steps - warmup  # after warm-up, and so is `done` below

    def after_warmup(done: int) -> float:
        match config.schedule:
            case "constant" | "constant_with_warmup":
                return 1.0
            case "linear":
                return max(0.0, (steps - done) / max(1, steps))
            case "polynomial":
                return least if done > steps else (1 - least) * (1 - done / steps) ** args.get("power", 1.0) + least
            case "inverse_sqrt":
                scale = args.get("timescale") or warmup or _ENDLESS_TIMESCALE
                return 1 / math.sqrt((done + scale) / scale)
            case "cosine_with_restarts":
                wave = args.get("num_cycles", 1.0) * done / max(1, steps) % 1.0
                return 0.0 if done >= max(1, steps) else _cosine(wave)
            case "cosine" | "cosine_with_min_lr":
                waves = args.get("num_cycles", 0.5) * 2 * done / max(1, steps)
                return max(0.0, _cosine(waves) * (1 - least) + least)
            case "warmup_stable_decay":
                return _decayed(done, steps, least, **args)

    def learning_rate(step: int) -> float:
        done = step - 1
        if done >= warmup:
            return config.lr * after_warmup(done - warmup)
        risen = _risen(done / warmup, args.get("warmup_type", "linear"))
        return config.lr * (risen * (1 - least) + least if config.schedule == "warmup_stable_decay" else risen)

    return learning_rate


def _least(config: OptimizerConfig, args: Mapping[str, Any]) -> float:
    """Return where the schedule ends, as a share of the peak."""
    if config.schedule == "polynomial":
        return args.get("lr_end", POLYNOMIAL_END) / config.lr
    return args["min_lr"] / config.lr if "min_lr" in args else args.get("min_lr_rate", args.get("min_lr_ratio", 0.0))


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


def _cosine(waves: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * waves))


def _risen(progress: float, curve: str) -> float:
    if curve == "linear":
        return progress
    return 1 - _cosine(progress) if curve == "cosine" else 1 - math.sqrt(1 - progress)


def _decayed(
    done: int,
    steps: int,
    least: float,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    decay_type: str = "cosine",
    num_cycles: float = 0.5,
    **_: object,
) -> float:
    stable = steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    if done < stable:
        return 1.0
    if done >= stable + num_decay_steps:
        return least
    progress = (done - stable) / num_decay_steps
    if decay_type == "cosine":
        left = _cosine(num_cycles * 2 * progress)
    else:
        left = 1 - (progress if decay_type == "linear" else math.sqrt(progress))
    return max(0.0, left * (1 - least) + least)
