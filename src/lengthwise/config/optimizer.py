"""The optimizer and the learning rate of a run: which there are, by name, and which arguments belong to a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from lengthwise.config.settings import Fraction, Settings
from lengthwise.core.errors import ConfigError

Curve = Literal["linear", "cosine", "1-sqrt"]

# The arguments of each schedule, by transformers' names, and those of them that have no default there.
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "decay_type", "num_cycles"),
        *("warmup_type", "min_lr_ratio"),
    ),
}
POLYNOMIAL_END = 1e-7  # transformers' lr_end

_FOLLOWS_LOSS = (
    "It follows an evaluation's loss; a learning rate is a function of the step here, on any resume the same"
)
# Names of other trainers that are known to be refused, by the key that has them: why, or what they are called here.
REFUSED_NAMES: Mapping[str, Mapping[str, str]] = {
    "schedule": {"reduce_lr_on_plateau": _FOLLOWS_LOSS, "greedy": _FOLLOWS_LOSS},
}


class ScheduleArgs(Settings):
    """What a schedule takes beside warm-up and the number of steps, by transformers' names."""

    num_cycles: float | None = Field(
        default=None, ge=0, description="waves of a cosine; default 0.5 (half a wave: down), of cosine_with_restarts 1"
    )
    min_lr: float | None = Field(
        default=None, ge=0, description="where a cosine ends, a learning rate; default null: see min_lr_rate"
    )
    min_lr_rate: float | None = Field(
        default=None, ge=0, le=1, description="where a cosine ends, as a share of lr; default null: see min_lr"
    )
    lr_end: float | None = Field(
        default=None, ge=0, description=f"where polynomial ends, a learning rate; default {POLYNOMIAL_END:g}"
    )
    power: float | None = Field(default=None, gt=0, description="exponent of polynomial; default 1")
    timescale: int | None = Field(
        default=None, ge=1, description="steps of inverse_sqrt; default warmup_steps, and 10000 without"
    )
    num_decay_steps: int | None = Field(default=None, ge=0, description="steps of the decay; required")
    num_stable_steps: int | None = Field(
        default=None, ge=0, description="steps at lr; default: those left beside warm-up and decay"
    )
    warmup_type: Curve | None = Field(default=None, description="linear, cosine or 1-sqrt; default linear")
    decay_type: Curve | None = Field(default=None, description="linear, cosine or 1-sqrt; default cosine")
    min_lr_ratio: float | None = Field(
        default=None, ge=0, le=1, description="where warm-up begins and decay ends, as a share of lr; default 0"
    )


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    name: Literal["adamw"] = Field(default="adamw", description="the optimizer; adamw is the only one; default adamw")
    lr: float = Field(default=3e-4, ge=0, description="peak learning rate, per step; default 3e-4")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95),
        strict=False,
        description="a list of two: decay of the first and second moment, each from 0 to below 1; default [0.9, 0.95]",
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment; default 1e-8")
    weight_decay: float = Field(
        default=0.1, ge=0, description="decay times lr a step, on parameters of 2 or more dimensions; default 0.1"
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="the global norm gradients are clipped to; null leaves them; default 1.0"
    )
    fused: bool | None = Field(
        default=None,
        description="the whole update in one kernel, which clips, too; rounds otherwise; default null: on GPUs only",
    )
    schedule: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = Field(default="constant", description="the learning rate, by transformers' names; default constant")
    schedule_args: ScheduleArgs | None = Field(
        default=None, description="what the schedule takes beside, by transformers' names; default null: its defaults"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="steps over which the learning rate grows from 0; default 0 (none)"
    )

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Ask for the arguments that belong to the schedule, and for those it needs."""
        return _schedule_problems(values, cls.model_fields["lr"].default)


def _schedule_problems(values: Mapping[str, object], default_lr: float) -> list[ConfigError]:
    """Return what is wrong between the keys of a schedule; of values of a wrong type nothing."""
    name, raw = values.get("schedule", "constant"), values.get("schedule_args")
    if not isinstance(name, str) or name not in SCHEDULES:
        return []
    args: Mapping[str, Any] = vars(raw) if isinstance(raw, ScheduleArgs) else raw if isinstance(raw, dict) else {}
    given = {key: value for key, value in args.items() if value is not None and key in ScheduleArgs.model_fields}
    found = []

    def refuse(key: str, expected: str, got: str, remedy: str) -> None:
        where = f"schedule_args.{key}" if key else "schedule_args"
        found.append(ConfigError(where, expected=expected, got=got, remedy=remedy))

    known = ", ".join(SCHEDULES[name]) or "nothing"
    for key in given:
        if key not in SCHEDULES[name]:
            others = ", ".join(other for other, keys in SCHEDULES.items() if key in keys)
            refuse(key, f"an argument of schedule {name}: {known}", f"`{key}`", f"Take it out; it belongs to {others}.")
    ends = [key for key in ("min_lr", "min_lr_rate") if key in given]
    if "min_lr" in SCHEDULES[name] and len(ends) != 1:
        got, remedy = ("both", "Take one out.") if ends else ("neither", "Add one, such as `min_lr_rate: 0.1`.")
        refuse("", "exactly one of `min_lr` and `min_lr_rate`", got, remedy)
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        refuse("num_decay_steps", "the steps of the decay", "none", "Add for example `num_decay_steps: 100`.")
    lr = values.get("lr", default_lr)
    lowest = {"polynomial": ("lr_end", POLYNOMIAL_END), "cosine_with_min_lr": ("min_lr", None)}
    key, default = lowest.get(name, ("", None))
    end = given.get(key, default)
    if isinstance(end, int | float) and isinstance(lr, int | float) and not lr > end:
        refuse(key, f"less than lr, {lr:g}", f"{end:g}", "Lower it, or raise lr.")
    return found
