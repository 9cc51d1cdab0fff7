"""The settings of a run and the rules between them; the keys of a run file are exactly these fields.

Types are strict: `steps: true` is an error. Descriptions give unit and default; errors quote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lengthwise.config.optimizer_config import OptimizerConfig
from lengthwise.config.sections import (
    CheckpointConfig,
    DataSource,
    EvalConfig,
    GlobalBatch,
    LoraConfig,
    SaveConfig,
    read_meanwhile,
    scheme_of,
)
from lengthwise.config.setting_types import PathSetting, Settings
from lengthwise.config.training import TrainingSettings
from lengthwise.core.errors import ConfigError
from lengthwise.core.names import BYTES_TOKENIZER

DEFAULT_STEPS = 100
TINY_MODEL = "tiny"


def _as_names(value: object) -> object:
    """Return one name as a list, and null or none as an empty one."""
    return () if value in (None, "none") else (value,) if isinstance(value, str) else value


class _Training(Settings):
    """The model, the data and the length of a run: keys that the resolved file lists first."""

    model: str = Field(min_length=1, description="tiny, a local Hugging Face folder, or a hub name")
    weights: Literal["load", "fresh"] | None = Field(
        default=None,
        description="load (load the model's weights) or fresh (draw random weights from the seed, even if the folder "
        "has weights); default null: load, but fresh for tiny and for a folder that holds only a config, "
        "with or without a tokenizer",
    )
    data: tuple[DataSource, ...] = Field(
        strict=False, min_length=1, description="a list of sources, read in order: [{path: train.jsonl}]"
    )
    eval: EvalConfig | None = Field(default=None, description="data and every_steps; default null (no evaluation)")
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="bytes (one byte is one token), a local Hugging Face folder or a hub name; default null: the "
        "model's own tokenizer, and bytes for tiny",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="the seed of all random numbers, 0 to 2^63 - 1; default 0")
    steps: int | None = Field(
        default=None, ge=1, description=f"optimizer steps; default {DEFAULT_STEPS} if epochs is not given"
    )
    epochs: int | None = Field(default=None, ge=1, description="the number of passes over the data, in place of steps")
    global_batch: GlobalBatch = Field(
        default=GlobalBatch(sequences=64),
        description="the size of a step: {sequences: n} or {tokens: n}; default {sequences: 64}",
    )


class RunConfig(TrainingSettings, _Training):
    """All settings of a run. `load_config` makes it and resolves paths; the output folder keeps a copy."""

    loss: Literal["chunked", "whole"] = Field(
        default="chunked",
        description="chunked (computes logits for a few tokens at a time; the result is the same) or whole (computes "
        "them for all tokens of a microbatch at once, which takes 14 bytes per token and vocabulary entry "
        "in bf16); default chunked",
    )
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        default="auto",
        description="fp32, bf16 (with fp32 master weights), fp64, or auto: bf16 on GPUs, fp32 on CPUs; default auto",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="{r: 16, ...}: train LoRA adapters on the frozen model; default null (train the whole model)",
    )
    quantization: Literal["nf4", "fp4", "int8"] | None = Field(
        default=None,
        description="nf4, fp4 (4 bits) or int8: load the frozen model quantized by bitsandbytes, all linear layers but "
        "the output head; beside lora (QLoRA); default null (not quantized)",
    )
    train_towers: bool = Field(
        default=False,
        description="true: the tower for images and its projector train, too; default false (they stay as they are)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto (GPUs if there are any), cpu or cuda; default auto"
    )
    checkpoint: CheckpointConfig | None = Field(
        default=None,
        description="{every_steps: 50}: save what `--resume` needs, also after the last step; default null (save only "
        "the model, at the end)",
    )
    save: SaveConfig | None = Field(
        default=None, description="{best: eval_loss}: also keep the model with the best evaluation; default null"
    )
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...],
        BeforeValidator(_as_names),
        Field(strict=False),
    ] = Field(
        default=(),
        description="the trackers to which rank 0 reports steps, one or a list: tensorboard, wandb, trackio, mlflow; "
        "default null (none)",
    )
    not_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="what the run does after a NaN or infinite loss or gradient: stop or skip (make no update in that "
        "step); after such a parameter it stops; default stop",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="the optimizer, AdamW unless you name another; every key has a default"
    )
    output: PathSetting = Field(description="the folder that this run writes; relative to the run file's folder")

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, values: object) -> object:
        """Fill in the default steps if neither steps nor epochs are given."""
        if not isinstance(values, dict) or values.get("steps") is not None or values.get("epochs") is not None:
            return values
        return {**values, "steps": DEFAULT_STEPS}

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return errors for values that do not go together, by this class's rules and `together`."""
        found = super().broken_rules(values)
        if values.get("save") is not None and values.get("eval") is None:
            remedy = "Add `eval: {data: [{path: eval.jsonl}]}`, or take save out."
            found.append(ConfigError("save", expected="`eval` beside it", got="none", remedy=remedy))
        trackers = values.get("report_to")
        if isinstance(trackers, list | tuple) and len({*map(str, trackers)}) < len(trackers):
            got, remedy = ", ".join(map(str, trackers)), "Remove the repeated names."
            found.append(ConfigError("report_to", expected="each tracker once", got=got, remedy=remedy))
        found += _not_read_meanwhile(values)
        if (scheme := scheme_of(output := values.get("output"))) is not None:
            expected, got = "a folder of this machine", f"{output}: {scheme}:// is not written yet"
            found.append(ConfigError("output", expected=expected, got=got, remedy="Mount it, and name that folder."))
        return found

    def precision_on(self, *, gpus: bool) -> str:
        """Return the precision on GPUs or CPUs: fp32, bf16 or fp64."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if gpus else "fp32"

    @property
    def tokenizer_name(self) -> str:
        """Tokenizer in use: the named one, else the model's own, or bytes for `tiny`."""
        if self.tokenizer is not None:
            return self.tokenizer
        return BYTES_TOKENIZER if self.model == TINY_MODEL else self.model


def _not_read_meanwhile(values: Mapping[str, object]) -> list[ConfigError]:
    """Refuse data read during training beside other data, and settings that need a count of all rows."""
    data, found = values.get("data"), []
    data = data if isinstance(data, list | tuple) else ()
    keys = [read_meanwhile(each) for each in data]
    key = next(filter(None, keys), None)
    if key is not None and set(keys) != {key}:
        number = next(number for number, other in enumerate(keys) if other != key)
        remedy = f"Set `{key}: true` on this source, too, or on none."
        where, expected = f"data.{number}.{key}", f"all sources `{key}`, or none"
        found.append(ConfigError(where, expected=expected, got="some of them", remedy=remedy))
    numbers = {str(each.get(key) if isinstance(each, Mapping) else getattr(each, key)) for each in data if key}
    if key == "streaming" and len(numbers) > 1:
        got, remedy = " and ".join(sorted(numbers)), "Set the same number."
        expected = "the same number of rows to shuffle for all sources, which form one stream"
        found.append(ConfigError("data.0.streaming", expected=expected, got=got, remedy=remedy))
    if key is not None and values.get("epochs") is not None:
        remedy = f"Set steps in its place, or take {key} out."
        expected = f"`steps` beside `{key}` data, whose number of rows is not known at the start"
        found.append(ConfigError("epochs", expected=expected, got=f"{values['epochs']}", remedy=remedy))
    return found
