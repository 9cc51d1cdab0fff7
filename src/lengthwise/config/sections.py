"""The sections of a run file; their descriptions are the help that users read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lengthwise.config.setting_types import Fraction, PathSetting, Settings, Tokens
from lengthwise.core.errors import ConfigError

ALL_LINEAR = "all-linear"
_HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"
_REMOTE = re.compile(r"(?:^|/)(s3a?|gs|gcs|az|abfss?|adl|hdfs|hf|oci|https?|ftp|file|memory):/")  # a Path has one slash
_SPLIT = r"\w+([.-]\w+)*"  # no slices such as `train[:10%]`


def scheme_of(path: object) -> str | None:
    """Return the scheme of a path on another machine, such as `s3`, or None for a local path."""
    found = _REMOTE.search(str(path)) if isinstance(path, str | Path) else None
    return found[1] if found else None


class DataSource(Settings):
    """A source of sequences: one file, one folder, a dataset of a hub, or the Python standard library."""

    path: PathSetting | None = Field(
        default=None,
        description="a file of JSON lines (plain, gzip or Zstandard), Parquet, Arrow or CSV, a dataset that "
        "save_to_disk wrote, a text file, or a folder of such files (one text is one document; links and hidden files "
        "are left out); relative to the run file's folder",
    )
    dataset: str | None = Field(
        default=None,
        pattern=rf"^{_HUB_NAME}$",
        description="a dataset of the Hugging Face hub, org/name, or a kind of files (csv, json, parquet, ...) with "
        "data_files: what load_dataset of the datasets library takes as path",
    )
    subset: str | None = Field(
        default=None, min_length=1, description="the name of a dataset's subset, if it has several"
    )
    split: str | None = Field(
        default=None,
        pattern=rf"^{_SPLIT}$",
        description="the split of a dataset, for example train; required with dataset",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="a branch, tag or commit of a dataset; default: its main branch"
    )
    data_files: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="files of a dataset, as load_dataset takes them: paths, URLs, patterns with *; of kinds of files, "
        "as json, relative to the run file's folder",
    )
    python_stdlib: bool = Field(
        default=False,
        description="true reads the .py files of the running Python's standard library, except tests; default false",
    )
    max_tokens: Tokens | None = Field(
        default=None, description="the most tokens in a sequence, 8192 or 8K; default null (no limit)"
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
    bad_rows: Literal["stop", "skip"] = Field(
        default="stop",
        description="a row that cannot be read (broken JSON or UTF-8, ids out of range, no known columns) stops the "
        "run (stop) or is left out and counted (skip); default stop",
    )
    weight: float = Field(
        default=1.0,
        ge=0.001,
        le=1000,
        description="how often an epoch repeats each row of this source: 3 takes each row three times, 0.5 takes half "
        "of the rows, and the other half in the next epoch; default 1",
    )
    remote: bool | Annotated[int, Field(ge=1)] = Field(
        default=False,
        description="true reads and tokenizes this source in an actor of Ray while the run trains, a number in as many "
        "actors; needs max_tokens; default false (all rows are read, or prepared, before the first step)",
    )
    streaming: bool | Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=False,
        description="true reads and tokenizes this source in file order while the run trains, in a process of each "
        "node; a number shuffles rows within blocks of that many; nothing is counted, prepared or downloaded before, "
        "and path may be a URL; needs max_tokens; default false",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_empty(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("python_stdlib") is True and "empty" not in values:
            return {**values, "empty": "skip"}
        return values

    @property
    def comes_meanwhile(self) -> str | None:
        """`remote` or `streaming`, the key by which rows are read during training, or None."""
        return read_meanwhile(self)

    @property
    def url(self) -> str | None:
        """The path as a URL, or None if it is local; a Path keeps only one of its slashes."""
        scheme = scheme_of(self.path)
        begin = f"{scheme}:///" if scheme == "file" else f"{scheme}://"
        return None if scheme is None else begin + str(self.path).partition(f"{scheme}:/")[2]

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return errors unless there is one source, with the keys that it needs and no others."""
        found = list[ConfigError]()

        def refuse(key: str, expected: str, got: str, remedy: str) -> None:
            found.append(ConfigError(key, expected=expected, got=got, remedy=remedy))

        given = [key for key in ("path", "dataset") if values.get(key) is not None]
        stdlib = values.get("python_stdlib") or False
        # Another check reports a value of a wrong type, such as `yes`; its meaning is unknown.
        if isinstance(stdlib, bool) and len(given) + stdlib != 1:
            got = " and ".join([*given, *["python_stdlib"] * stdlib]) or "none of them"
            remedy = "Split the source in two." if given else "Add one of them."
            refuse("", "exactly one of `path`, `dataset` and `python_stdlib: true`", got, remedy)
        if (scheme := scheme_of(path := values.get("path"))) is not None and not values.get("streaming"):
            remedy = "Set `streaming: true`, or mount or copy the data and name that path."
            refuse("path", "a path on this machine", f"{path}: {scheme}:// can only be streamed", remedy)
        of_datasets = [key for key in ("subset", "split", "revision", "data_files") if values.get(key) is not None]
        if "dataset" in given and "split" not in of_datasets:
            refuse("split", "the split of the dataset", "none", "Add for example `split: train`.")
        for key in of_datasets if "dataset" not in given else ():
            refuse(key, "a `dataset` beside it", "none", "Take it out, or name the `dataset`.")
        if meanwhile := read_meanwhile(values):
            one_of_them = "Take one of them out."
            if values.get("max_tokens") is None:
                expected = f"the longest row that `{meanwhile}` rows may have"
                refuse("max_tokens", expected, "none", "Add for example `max_tokens: 32K`.")
            if values.get("weight", 1) != 1:
                expected = f"no weight beside `{meanwhile}`: weights need a count of all rows"
                refuse("weight", expected, f"{values['weight']}", one_of_them)
            if values.get("remote") and values.get("streaming"):
                expected = "`remote` (rows in random order) or `streaming` (rows in file order)"
                refuse("streaming", expected, "both", one_of_them)
        elif values.get("too_long") == "skip" and values.get("max_tokens") is None:
            expected, got = "`max_tokens` beside `too_long: skip`", "no max_tokens, so nothing could be too long"
            refuse("too_long", expected, got, "Set max_tokens, or take too_long out.")
        return found


def read_meanwhile(source: object) -> str | None:
    """Return the key by which rows of a source, checked or raw, are read during training, or None."""
    values = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
    return next((key for key in ("remote", "streaming") if values.get(key)), None)


class EvalConfig(Settings):
    """Data on which the model is evaluated during training, and how often."""

    data: tuple[DataSource, ...] = Field(
        strict=False, min_length=1, description="a list of sources, like the run's own data"
    )
    every_steps: int = Field(default=50, ge=1, description="optimizer steps between two evaluations; default 50")

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return errors for weights and for data read during training: an evaluation takes all data once."""
        data = values.get("data")
        sources = data if isinstance(data, list | tuple) else ()
        weights = [each.get("weight") if isinstance(each, dict) else getattr(each, "weight", 1) for each in sources]
        expected, remedy = "no weights: an evaluation takes all of its data once", "Take weight out."
        found = [
            ConfigError(f"data.{number}.weight", expected=expected, got=f"{weight}", remedy=remedy)
            for number, weight in enumerate(weights)
            if weight not in (None, 1)
        ]
        for number, each in enumerate(sources):
            if key := read_meanwhile(each):
                expected, remedy = "data that is read at the start", f"Take {key} out."
                found.append(ConfigError(f"data.{number}.{key}", expected=expected, got=key, remedy=remedy))
        return found


class GlobalBatch(Settings):
    """The size of one optimizer step."""

    sequences: int | None = Field(default=None, ge=1, description="the number of sequences in a step")
    tokens: Tokens | None = Field(
        default=None,
        description="the number of tokens in a step, 262144 or 256K: as many whole sequences as fit, at least one",
    )

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return an error unless exactly one of the two is given."""
        given = [name for name in ("sequences", "tokens") if values.get(name) is not None]
        if len(given) == 1:
            return []
        expected, got = "exactly one of `sequences` and `tokens`", "both" if given else "neither"
        remedy = "Write {sequences: 64} or {tokens: 262144}; "
        remedy += "on the command line --set global_batch='{tokens: 262144}' replaces both."
        return [ConfigError("", expected=expected, got=got, remedy=remedy)]


class SaveConfig(Settings):
    """Models that a run keeps beside the last."""

    best: Literal["eval_loss"] = Field(
        default="eval_loss",
        description="eval_loss: keep the model with the lowest evaluation loss, in output/model-best",
    )


class OffloadConfig(Settings):
    """The share of a microbatch's activations that is offloaded until its backward, and where to."""

    ratio: Literal["auto", "off"] | Annotated[float, Field(ge=0, le=1)] = Field(
        default="auto",
        description="the share of a microbatch's activations to offload: auto (as much as each microbatch needs, if "
        "that pays), off, or a share from 0 to 1 for every microbatch, of all layers but two; default auto",
    )
    store: Literal["host", "disk"] = Field(
        default="host", description="host (memory beside GPUs) or disk (a folder, on any machine); default host"
    )
    path: PathSetting | None = Field(
        default=None, description="the folder for store: disk; relative to the run file's folder; default null"
    )

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return an error if `store: disk` has no path, or another store has one."""
        on_disk, has_path = values.get("store", "host") == "disk", values.get("path") is not None
        if on_disk == has_path:
            return []
        expected = "`path` beside `store: disk`" if on_disk else "`path` only beside `store: disk`"
        got, remedy = ("none", "Add a folder.") if on_disk else ("a path", "Add `store: disk`, or take it out.")
        return [ConfigError("path", expected=expected, got=got, remedy=remedy)]


class CheckpointConfig(Settings):
    """When checkpoints are saved, and how many are kept."""

    every_steps: int = Field(
        default=50, ge=0, description="optimizer steps between two checkpoints; 0: none by steps; default 50"
    )
    every_minutes: float = Field(
        default=0.0, ge=0, description="minutes between two checkpoints, by rank 0's clock; 0: none by time; default 0"
    )
    keep_last: int = Field(default=3, ge=1, description="the number of newest checkpoints to keep; default 3")
    background: bool = Field(
        default=True,
        description="true writes a checkpoint while the next steps run; false waits until it is written; default true",
    )


class LoraConfig(Settings):
    """Low-rank adapters on a frozen base model; keys and defaults are those of peft's `LoraConfig`."""

    r: int | None = Field(default=None, ge=1, description="rank of the adapters; default 8")
    lora_alpha: int | None = Field(
        default=None,
        ge=1,
        description="the scale of adapters is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora; default 8",
    )
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        strict=False,
        description="all-linear (every linear layer but the output head), or a list of module names as in the model: "
        "[q_proj, v_proj]; default all-linear",
    )
    use_rslora: bool | None = Field(
        default=None, description="true scales adapters by lora_alpha / sqrt(r); default false"
    )
    adapter: PathSetting | None = Field(
        default=None,
        description="the folder of a saved LoRA adapter to continue from; it sets all keys above; default null",
    )
    lora_dropout: Fraction | None = Field(
        default=None, description="the dropout rate of each adapter's inputs in training, from 0 to below 1; default 0"
    )

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
        others = {"use_rslora": False, "lora_dropout": 0.0}
        return {"r": 8, "lora_alpha": 8, "target_modules": [ALL_LINEAR], **others, **given}

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return an error for keys beside `adapter`, which sets them."""
        keys = ("r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout")
        given = [key for key in keys if values.get(key) is not None]
        if values.get("adapter") is None or not given:
            return []
        remedy = "Take them out: the adapter has its own."
        expected = f"no {' or '.join(keys)} beside it"
        return [ConfigError("adapter", expected=expected, got=", ".join(given), remedy=remedy)]
