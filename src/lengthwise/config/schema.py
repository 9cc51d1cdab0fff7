"""The settings of a run and the rules between them; the keys of a run file are exactly these fields.

Types are strict: `steps: true` and `steps: 1.5` are errors, a whole number is fine where a number is asked. Each
description says the unit and the default, because it is also the help a user reads when the value is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import BYTES_TOKENIZER, PLANNER_GROUP
from lengthwise.core.sizes import parse_tokens

DEFAULT_STEPS = 100
ALL_LINEAR = "all-linear"
TINY_MODEL = "tiny"
MEASURE_AT_START, MEASURE_NOTHING = "auto", "off"

# A YAML list is what a user can write for a tuple, and text for a path: the two places where strict types give way.
_Path = Annotated[Path, Field(strict=False)]
_Fraction = Annotated[float, Field(ge=0, lt=1)]


def _read_tokens(value: object) -> object:
    """Read 8K or 2M as the command line does; anything else stays as it is, for the type to take or refuse."""
    if isinstance(value, str) and not value.strip().isdecimal():
        with contextlib.suppress(ConfigError):
            return parse_tokens(value, "")
    return value


def _take_planner(value: object, of_ours: Callable[[object], str]) -> str:
    """Take a planner of ours, or one that an installed package names in its entry points."""
    try:
        return of_ours(value)
    except ValidationError:
        if isinstance(value, str) and value in entry_points(group=PLANNER_GROUP).names:
            return value
        raise


_Tokens = Annotated[int, Field(ge=1), BeforeValidator(_read_tokens)]


class Settings(BaseModel):
    """A section of the run file: immutable, no unknown keys, no silent casts, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return what the type of one field cannot say, each with its key ("": the section) for the place.

        `values` may be raw, and wrong in other ways too.
        """
        del values
        return []

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        for rule in self.broken_rules(self.__dict__):
            raise PydanticCustomError("rule", "{rule}", {"rule": str(rule)})
        return self


class DataSource(Settings):
    """Where sequences come from: one file, one folder, or the Python standard library."""

    path: _Path | None = Field(
        default=None,
        description="a file of JSON lines, or a folder of text files (one file one document; links and hidden files "
        "are left out); relative to the run file's folder",
    )
    python_stdlib: bool = Field(
        default=False,
        description="true reads the .py files of the running Python's standard library, tests left out; default false",
    )
    max_tokens: _Tokens | None = Field(
        default=None, description="the longest sequence to take, in tokens, 8192 or 8K; default null (no limit)"
    )
    too_long: Literal["error", "skip"] = Field(
        default="error",
        description="a sequence over max_tokens stops the run (error) or is left out and counted (skip); default error",
    )
    empty: Literal["error", "skip"] = Field(
        default="error",
        description="an empty row or file stops the run (error) or is left out and counted (skip); default error for "
        "a path, skip for the standard library, which has empty files on purpose",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_empty(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("python_stdlib") is True and "empty" not in values:
            return {**values, "empty": "skip"}
        return values

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Ask for exactly one source, and for a limit where too long ones are to be skipped."""
        found = []
        has_path, stdlib = values.get("path") is not None, values.get("python_stdlib") or False
        # A value of a wrong type, such as `yes`, is reported as such, and says nothing of what was meant.
        if isinstance(stdlib, bool) and has_path == stdlib:
            expected, got = "exactly one of `path` and `python_stdlib: true`", "both" if has_path else "neither"
            remedy = "Split the source in two." if has_path else "Add one of the two."
            found.append(ConfigError("", expected=expected, got=got, remedy=remedy))
        if values.get("too_long") == "skip" and values.get("max_tokens") is None:
            expected, got = "`max_tokens` beside `too_long: skip`", "no max_tokens, so nothing could be too long"
            remedy = "Set max_tokens, or take too_long out."
            found.append(ConfigError("too_long", expected=expected, got=got, remedy=remedy))
        return found


class EvalConfig(Settings):
    """What the model is tried on while it trains, and how often."""

    data: tuple[DataSource, ...] = Field(
        strict=False, min_length=1, description="a list of sources, like the run's own data"
    )
    every_steps: int = Field(default=50, ge=1, description="optimizer steps between two evaluations; default 50")


class GlobalBatch(Settings):
    """How much one optimizer step takes."""

    sequences: int | None = Field(default=None, ge=1, description="sequences a step")
    tokens: _Tokens | None = Field(
        default=None, description="tokens a step, 262144 or 256K: as many whole sequences as fit, at least one"
    )

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Ask for exactly one of the two measures."""
        given = [name for name in ("sequences", "tokens") if values.get(name) is not None]
        if len(given) == 1:
            return []
        expected, got = "exactly one of `sequences` and `tokens`", "both" if given else "neither"
        remedy = (
            "Write {sequences: 64} or {tokens: 262144}; "
            "on the command line --set global_batch='{tokens: 262144}' replaces both."
        )
        return [ConfigError("", expected=expected, got=got, remedy=remedy)]


class OffloadConfig(Settings):
    """Which share of a microbatch's activations is elsewhere until its backward, and where."""

    ratio: Literal["auto", "off"] | Annotated[float, Field(ge=0, le=1)] = Field(
        default="auto",
        description="auto (of each microbatch as much as it needs, where that pays), off, or the share of every "
        "microbatch, 0 to 1, of all layers but two; default auto",
    )
    store: Literal["host", "disk"] = Field(
        default="host", description="host (memory beside GPUs) or disk (a folder, on any machine); default host"
    )
    path: _Path | None = Field(
        default=None, description="the folder of store disk; relative to the run file's folder; default null"
    )

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Ask for a folder where there is a disk, and for none elsewhere."""
        on_disk, has_path = values.get("store", "host") == "disk", values.get("path") is not None
        if on_disk == has_path:
            return []
        expected = "`path` beside `store: disk`" if on_disk else "`path` only beside `store: disk`"
        got, remedy = ("none", "Add a folder.") if on_disk else ("a path", "Add `store: disk`, or take it out.")
        return [ConfigError("path", expected=expected, got=got, remedy=remedy)]


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    name: Literal["adamw"] = Field(default="adamw", description="the optimizer; adamw is the only one; default adamw")
    lr: float = Field(default=3e-4, ge=0, description="peak learning rate, per step; default 3e-4")
    betas: tuple[_Fraction, _Fraction] = Field(
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
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="the learning rate after warm-up: constant, or linear or cosine towards 0 after the last step; "
        "default constant",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="steps over which the learning rate grows from 0; default 0 (none)"
    )


class LoraConfig(Settings):
    """Low-rank adapters on a frozen base model; keys and defaults are those of peft's `LoraConfig`."""

    r: int | None = Field(default=None, ge=1, description="rank of the adapters; default 8")
    lora_alpha: int | None = Field(
        default=None, ge=1, description="adapters are scaled by lora_alpha / r, or / sqrt(r) with use_rslora; default 8"
    )
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        strict=False,
        description="all-linear (every linear layer but the output head), or a list of module names as in the model: "
        "[q_proj, v_proj]; default all-linear",
    )
    use_rslora: bool | None = Field(default=None, description="scale by lora_alpha / sqrt(r); default false")
    adapter: _Path | None = Field(
        default=None,
        description="the folder of a saved LoRA adapter to go on from; it brings all keys above; default null",
    )
    lora_dropout: float = Field(
        default=0.0, ge=0, le=0, description="0: what is drawn at random in training is not supported yet"
    )
    bias: Literal["none"] = Field(default="none", description="none: only adapters are trained")
    use_dora: Literal[False] = Field(default=False, description="false: DoRA is not supported")
    modules_to_save: None = Field(default=None, description="null: only adapters are trained")

    @model_validator(mode="before")
    @classmethod
    def _fill_adapter(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("target_modules"), str):
            values = {**values, "target_modules": [values["target_modules"]]}
        if values.get("adapter") is not None:
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {"r": 8, "lora_alpha": 8, "target_modules": [ALL_LINEAR], "use_rslora": False, **given}

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Let an adapter that is there say what it is."""
        keys = ("r", "lora_alpha", "target_modules", "use_rslora")
        given = [key for key in keys if values.get(key) is not None]
        if values.get("adapter") is None or not given:
            return []
        remedy = "Take them out: the adapter's own are used."
        expected = f"no {' or '.join(keys)} beside it"
        return [ConfigError("adapter", expected=expected, got=", ".join(given), remedy=remedy)]


class RunConfig(Settings):
    """Everything that decides a run. Made by `load_config`, which also resolves paths; written to the output folder."""

    model: str = Field(min_length=1, description="tiny, a local Hugging Face folder, or a hub name")
    weights: Literal["load", "fresh"] | None = Field(
        default=None,
        description="load (the model's own) or fresh (drawn from the seed, whatever the model's folder holds); default "
        "null: load, but fresh for tiny and for a folder with a config, perhaps a tokenizer, and no more",
    )
    data: tuple[DataSource, ...] = Field(
        strict=False, min_length=1, description="a list of sources, read in order: [{path: train.jsonl}]"
    )
    eval: EvalConfig | None = Field(default=None, description="data and every_steps; default null (no evaluation)")
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="bytes (one byte one token), a local Hugging Face folder or a hub name; default null: the model's "
        "own, and bytes for tiny",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="start of all random numbers, 0 to 2^63 - 1; default 0")
    steps: int | None = Field(
        default=None, ge=1, description=f"optimizer steps; default {DEFAULT_STEPS} where epochs is not given"
    )
    epochs: int | None = Field(default=None, ge=1, description="passes over the data, in place of steps")
    global_batch: GlobalBatch = Field(
        default=GlobalBatch(sequences=64), description="{sequences: n} or {tokens: n} a step; default {sequences: 64}"
    )
    capacity_tokens: Literal["auto"] | _Tokens = Field(
        default="auto",
        description="tokens one rank can hold in one microbatch, 8192 or 8K; or auto: as many as the memory that is "
        "free at the start holds; default auto",
    )
    planner: Annotated[
        Literal["lengthwise", "static", "single-degree", "bytescale-naive", "bytescale", "power-of-two"],
        WrapValidator(_take_planner),
        PlainSerializer(str),
    ] = Field(
        default="lengthwise",
        description="lengthwise plans each step from its lengths; static (one fixed mesh), single-degree, "
        "bytescale-naive, bytescale and power-of-two are there to compare with, and packages may register others; "
        "default lengthwise",
    )
    recompute: Literal["auto", "none", "layer", "all_but_attention"] = Field(
        default="auto",
        description="what backward computes again in place of keeping it: none, layer (every decoder layer) or "
        "all_but_attention (the same, but attention and its ring run once); or auto: what ends each step first where "
        "`capacity_tokens` is auto, none where it is a number; default auto",
    )
    offload: OffloadConfig | None = Field(
        default=None,
        description="{store: disk, path: /scratch}: keep a share of the activations elsewhere until backward; default "
        "null, or off (all on the device)",
    )
    heads: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="whether ranks that share a sequence split attention heads (all-to-all) in place of passing keys "
        "on: auto (the planner's choice), off, or a number (groups of so many ranks, wherever they divide the ranks "
        "of a ring and the model's heads); default auto",
    )
    measurements: str | None = Field(
        default=None,
        min_length=1,
        description="what steps are planned by: auto (measured for some seconds before the first step), a file of "
        "`lengthwise profile` (both corrected by the run's own steps, so that plans may differ from run to run), or "
        "off: estimates for the device; default null: auto where the run takes long enough, else off",
    )
    attention: Literal["auto", "flash2", "flash3", "flash4", "cudnn", "efficient", "reference"] = Field(
        default="auto",
        description="the attention implementation: auto (the fastest that the device, its libraries and the model "
        "allow), on GPUs flash2, flash3, flash4, cudnn (for long documents, flash2 for the others) or efficient, "
        "anywhere reference (plain matrix products, slow); default auto",
    )
    compile: bool = Field(
        default=False,
        description="true compiles decoder layers around their attention (torch.compile), some seconds at the first "
        "step, not those of mixtures of experts; default false",
    )
    fused_layers: Literal["auto", "off", "liger"] = Field(
        default="auto",
        description="norms, RoPE and MLPs by Liger Kernel's fused functions: liger (on GPUs, in families known to be "
        "right, not beside compile), off, or auto: where that can be and liger-kernel is installed; default auto",
    )
    experts: Literal["auto", "eager", "grouped_mm"] = Field(
        default="auto",
        description="how a mixture's experts compute: eager (one by one), grouped_mm (all in one product, bf16 and "
        "fp32), or auto: grouped_mm in bf16 on GPUs, else eager; default auto",
    )
    loss: Literal["chunked", "whole"] = Field(
        default="chunked",
        description="chunked (logits are made for a few tokens at a time, the same result) or whole (for all tokens of "
        "a microbatch at once: 14 bytes a token and word of the vocabulary in bf16); default chunked",
    )
    precision: Literal["fp32", "bf16", "fp64"] = Field(
        default="fp32", description="fp32, bf16 (with fp32 master weights) or fp64; default fp32"
    )
    lora: LoraConfig | None = Field(
        default=None, description="{r: 16, ...}: train LoRA adapters on the frozen model; default null (train it all)"
    )
    overlap: bool | None = Field(
        default=None,
        description="sums of gradients travel while the last backward of a rank runs, and updated parameters while the "
        "next forward does, where no ring is under way; the same result; default null: on GPUs only",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto (GPUs where there are any), cpu or cuda; default auto"
    )
    memory_check: bool | None = Field(
        default=None,
        description="true runs the largest microbatch once before the first step, so that too little memory shows at "
        "once; default null: on GPUs only",
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="AdamW; every key has a default")
    output: _Path = Field(description="the folder this run writes; relative to the run file's folder")

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, values: object) -> object:
        """Fill in the steps where neither end of the run is given, and take `offload: off` for none."""
        if not isinstance(values, dict):
            return values
        ends = values.get("steps") is not None or values.get("epochs") is not None
        offload = {"offload": None} if values.get("offload") == "off" else {}
        return {**values, **offload, **({} if ends else {"steps": DEFAULT_STEPS})}

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Allow only one end of the run."""
        found = []
        if values.get("steps") is not None and values.get("epochs") is not None:
            remedy = "Take one of them out, or set it to null."
            found.append(
                ConfigError("steps", expected="at most one of `steps` and `epochs`", got="both", remedy=remedy)
            )
        return found

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer in use: the one named, else the model's own, and bytes for `tiny`."""
        if self.tokenizer is not None:
            return self.tokenizer
        return BYTES_TOKENIZER if self.model == TINY_MODEL else self.model


# The section each part of a run file is read into, by its config path without list indices.
SECTIONS: Mapping[tuple[str, ...], type[Settings]] = {
    (): RunConfig,
    ("data",): DataSource,
    ("eval",): EvalConfig,
    ("eval", "data"): DataSource,
    ("global_batch",): GlobalBatch,
    ("optimizer",): OptimizerConfig,
    ("lora",): LoraConfig,
    ("offload",): OffloadConfig,
}
