"""The optimizers and learning-rate schedules of a run, by name, and the arguments of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lengthwise.config.setting_types import Fraction, Settings
from lengthwise.core.errors import ConfigError

FRESH_RATE, LOADED_RATE, LOADED_WARMUP = 3e-4, 2e-5, 0.03  # AdamW's; for fine-tuning, as in TRL
LORA_RATE = 2e-4  # of adapters: ten times the whole model's, as in LoRA recipes

# The arguments of each optimizer, with their defaults: torch's; for Lion the paper's, for AdamW ours. None: it depends
# on the model (`run.checks`).
OPTIMIZERS: Mapping[str, Mapping[str, object]] = {
    "adamw": {"lr": None, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
}
_ARGUMENTS = tuple(dict.fromkeys(key for arguments in OPTIMIZERS.values() for key in arguments))

_STATES = {"sgd": (), "lion": ("exp_avg",)}

# The arguments of each schedule, by transformers' names.
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
    "It follows an evaluation's loss; here a learning rate is a function of the step, the same after any resume"
)
# Names of other trainers that are refused, by key: the reason, or their name here.
_NOT_BY_ENTRY = "Its update of an entry depends on {}, and a rank's slice may begin and end inside a parameter"
_MATRICES, _NORMS = _NOT_BY_ENTRY.format("the whole matrix"), _NOT_BY_ENTRY.format("the norm of the whole parameter")
_BLOCKS = "8-bit states are rounded in blocks, which slices would cut: results would depend on the number of ranks"
_IN_8_BIT = (  # transformers' names, then those of bitsandbytes' classes
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "lion_8bit", "paged_lion_8bit"),
    *("rmsprop_bnb_8bit", "ademamix_8bit", "paged_ademamix_8bit"),
    *("adamw8bit", "pagedadamw8bit", "adam8bit", "lion8bit", "sgd8bit", "rmsprop8bit", "adagrad8bit", "lamb8bit"),
)
REFUSED_NAMES: Mapping[str, Mapping[str, str]] = {
    "name": {
        **dict.fromkeys(("adafactor", "muon", "shampoo", "soap", "galore_adamw", "apollo_adamw"), _MATRICES),
        **dict.fromkeys(("lamb", "lars"), _NORMS),
        **dict.fromkeys(_IN_8_BIT, _BLOCKS),
        **dict.fromkeys(("adamw_torch", "adamw_hf", "adamw_torch_fused"), "Here it is adamw"),
        **dict.fromkeys(("adagrad", "rmsprop", "nadam", "radam"), "A `Session` takes torch's own"),
        "lbfgs": "It takes several forward passes per step, and a global history",
    },
    "schedule": {"reduce_lr_on_plateau": _FOLLOWS_LOSS, "greedy": _FOLLOWS_LOSS},
    "precision": dict.fromkeys(("fp16", "float16", "half"), "Here it is bf16: fp16 needs a loss scale"),
}


class OptimizerConfig(Settings):
    """The optimizer and its learning-rate schedule. Arguments of other optimizers are None."""

    name: Literal["adamw", "adam", "sgd", "lion"] = Field(
        default="adamw", description="the optimizer; its other keys and their defaults depend on it; default adamw"
    )
    lr: float | None = Field(
        default=None,
        ge=0,
        description=f"the peak learning rate; default for adamw {LOADED_RATE:g} if weights are loaded, "
        f"{LORA_RATE:g} under `lora`, {FRESH_RATE:g} for fresh weights",
    )
    betas: tuple[Fraction, Fraction] | None = Field(
        default=(0.9, 0.95),
        strict=False,
        description="a list of two: decay of the first and second moment, each from 0 to below 1; default of adamw "
        "[0.9, 0.95]",
    )
    eps: float | None = Field(
        default=1e-8, gt=0, description="added to the root of the second moment; default of adamw 1e-8"
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="decay per step, of parameters with 2 or more dimensions; default of adamw 0.1"
    )
    momentum: Fraction | None = Field(default=None, description="momentum of sgd, from 0 to below 1; default 0")
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="gradients are clipped to this global norm; null: no clipping; default 1.0"
    )
    offload: bool = Field(
        default=False,
        description="keeps master weights and states in host memory and updates them there, at the CPU's speed; a GPU "
        "then holds only parameters and gradients; default false",
    )
    schedule: (
        Literal[
            "constant",
            "constant_with_warmup",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_with_min_lr",
            "polynomial",
            "inverse_sqrt",
            "warmup_stable_decay",
        ]
        | None
    ) = Field(
        default=None,
        description="the learning-rate schedule, by transformers' names; default cosine if weights are loaded, "
        "constant for fresh weights",
    )
    schedule_args: dict[str, float | str] | None = Field(
        default=None,
        description="{min_lr_rate: 0.1}: further arguments of the schedule, by transformers' names; default: its own",
    )
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None,
        description="steps before the learning rate is full, none with 0; below 1: a share of all steps; default "
        f"{LOADED_WARMUP:g} if weights are loaded and the schedule is not constant, else 0 (none)",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_arguments(cls, values: object) -> object:
        """Fill in the optimizer's own defaults, and None for arguments of other optimizers."""
        if not isinstance(values, dict):
            return values
        name = values.get("name", "adamw")
        own = OPTIMIZERS[name] if isinstance(name, str) and name in OPTIMIZERS else {}
        given = {key: value for key, value in values.items() if value is not None or key not in _ARGUMENTS}
        others = dict.fromkeys(key for key in _ARGUMENTS if own and key not in own)
        return {**others, **own, **given}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the optimizer, by torch's names, without `lr` and `weight_decay`."""
        return {key: getattr(self, key) for key in OPTIMIZERS[self.name] if key not in ("lr", "weight_decay")}

    @property
    def states(self) -> tuple[str, ...]:
        """States that it keeps for each entry, by torch's names; all begin as zeros."""
        return (*_STATES.get(self.name, ("exp_avg", "exp_avg_sq")), *["momentum_buffer"] * bool(self.momentum))

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return errors for arguments of other optimizers and schedules, and for missing ones."""
        name = values.get("name", "adamw")
        if not isinstance(name, str) or name not in OPTIMIZERS:
            return []
        own, found = OPTIMIZERS[name], []
        for key in _ARGUMENTS:
            if values.get(key) is not None and key not in own:
                others = ", ".join(other for other, keys in OPTIMIZERS.items() if key in keys)
                expected, remedy = f"an argument of {name}: {', '.join(own)}", f"Take it out; it belongs to {others}."
                found.append(ConfigError(key, expected=expected, got=f"`{key}`", remedy=remedy))
        default_lr = own["lr"] or LOADED_RATE
        assert isinstance(default_lr, float), default_lr
        return found + _schedule_problems(values, default_lr)


def _schedule_problems(values: Mapping[str, object], default_lr: float) -> list[ConfigError]:
    """Return contradictions between the keys of a schedule; other checks report values of a wrong type."""
    name, raw = values.get("schedule") or "cosine", values.get("schedule_args")
    if not isinstance(name, str) or name not in SCHEDULES:
        return []
    given: Mapping[str, Any] = raw if isinstance(raw, dict) else {}
    found = []

    def refuse(key: str, expected: str, got: str, remedy: str) -> None:
        where = f"schedule_args.{key}" if key else "schedule_args"
        found.append(ConfigError(where, expected=expected, got=got, remedy=remedy))

    known = ", ".join(SCHEDULES[name]) or "nothing"
    for key in given:
        if key not in SCHEDULES[name]:
            others = ", ".join(other for other, keys in SCHEDULES.items() if key in keys) or "no schedule"
            refuse(key, f"an argument of schedule {name}: {known}", f"`{key}`", f"Take it out; it belongs to {others}.")
    ends = [key for key in ("min_lr", "min_lr_rate") if key in given]
    if "min_lr" in SCHEDULES[name] and len(ends) != 1:
        got, remedy = ("both", "Take one out.") if ends else ("neither", "Add one, such as `min_lr_rate: 0.1`.")
        refuse("", "exactly one of `min_lr` and `min_lr_rate`", got, remedy)
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        refuse("num_decay_steps", "the number of steps of the decay", "none", "Add for example `num_decay_steps: 100`.")
    lr = default_lr if values.get("lr") is None else values["lr"]
    lowest = {"polynomial": ("lr_end", POLYNOMIAL_END), "cosine_with_min_lr": ("min_lr", None)}
    key, default = lowest.get(name, ("", None))
    end = given.get(key, default)
    if isinstance(end, int | float) and isinstance(lr, int | float) and not lr > end:
        refuse(key, f"less than lr, {lr:g}", f"{end:g}", "Lower it, or raise lr.")
    return found
