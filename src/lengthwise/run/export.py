"""A checkpoint as a model folder, from what a run left in its output: on one process, without the run's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lengthwise.checkpoint import (
    CheckpointFolder,
    RunManifest,
    broken,
    changed,
    differences,
    read_run_manifest,
    read_state,
    unfit,
)
from lengthwise.comm.solo import SoloTransport
from lengthwise.config import RunConfig, load_config
from lengthwise.core.errors import ConfigError, OutputError
from lengthwise.core.files import whole_folder
from lengthwise.data import Tokenizer, load_tokenizer
from lengthwise.engine.lay import lay_parameters
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.slices import Sharding
from lengthwise.models import (
    DTYPES,
    build_adapted,
    copy_processor,
    find_model,
    save_adapter,
    save_model,
)
from lengthwise.run.folder import CONFIG
from lengthwise.run.resume import FOLDER, model_settings, run_settings

_ANOTHER = "Take another checkpoint, with {step}."


def write_model(model: Any, config: RunConfig, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the trained model, or its adapter, and the tokenizer as Hugging Face folders have them."""
    if tokenizer is not None:
        _stop_where_learned(model, tokenizer.special_ids())
    save = save_model if config.lora is None else save_adapter
    save(model, folder)
    if config.lora is None:
        copy_processor(model, config.model, folder)
    if tokenizer is not None:
        tokenizer.save(folder)


def _stop_where_learned(model: Any, special_ids: Mapping[str, Sequence[int]]) -> None:
    """Give the model's configs the tokenizer's special tokens, as transformers' Trainer does, and its template's end.

    Tokens that generation stops at already stay, as do those of a config that lists several.
    """
    generation = getattr(model, "generation_config", None)
    for config in filter(None, (model.config.get_text_config(), generation)):
        for key, own in special_ids.items():
            value = getattr(config, key, None)
            there = value if isinstance(value, list) else [value] if config is generation and value is not None else []
            ids = [*own, *(each for each in there if each not in own)] if key == "eos_token_id" else own
            setattr(config, key, ids[0] if len(ids) == 1 else ids)


def chosen_checkpoint(output: Path, step: int | None) -> tuple[Path, RunManifest]:
    """Return the checkpoint after `step` of the run in this folder, or the newest that is whole by its sizes.

    Raises:
        OutputError: there is none, or its manifest is broken.
    """
    folder = CheckpointFolder(output / FOLDER)
    if step is None:
        path, manifest, _ = folder.newest()
        return path, manifest
    if step not in folder.steps():
        there = ", ".join(map(str, folder.steps())) or "none"
        expected = f"a checkpoint after step {step}"
        raise OutputError(str(folder.path), expected=expected, got=f"those after {there}", remedy=_ANOTHER)
    return folder.at(step), read_run_manifest(folder.at(step))


def export_checkpoint(output: Path, to: Path, *, step: int | None = None) -> Path:
    """Write the model of a checkpoint into the new folder `to`, the same files as at the end of a run; return which.

    `output`: of the run, with its `config.yaml`. The tokenizer goes with it where the model has one.

    Raises:
        OutputError: no such checkpoint, a file that is not what was written, or a folder that is there.
        LengthwiseError: the run's model cannot be found any more.
    """
    path, manifest = chosen_checkpoint(output, step)
    if to.exists():
        raise OutputError(str(to), expected="a new folder", got="one that is there", remedy="Choose another {to}.")
    config = load_config(output / CONFIG)
    other = changed(model_settings(manifest.run), model_settings(run_settings(config)))
    if other:
        expected, remedy = "the settings that the checkpoint was saved with", "Put the run's own config.yaml back."
        raise OutputError(str(output / CONFIG), expected=expected, got="; ".join(other), remedy=remedy)
    found = broken(path, manifest)
    if found is not None:
        raise OutputError(str(path), expected="the files that were written", got=found, remedy=_ANOTHER)
    model, parameters = _build(config)
    dtype = str(parameters.master_weights.dtype).removeprefix("torch.")
    wrong = differences(manifest, parameters.names, parameters.shapes, dtype)
    if wrong:
        remedy = "Put the model back that the run began with."
        raise OutputError(str(path), expected=f"parameters of {config.model}", got="; ".join(wrong[:8]), remedy=remedy)
    found = unfit(path, manifest, parameters.state())
    if found is not None:
        raise OutputError(str(path), expected="states that a run can go on from", got=found, remedy=_ANOTHER)
    read_state(path, manifest, parameters.layout, parameters.names, 0, parameters.state())
    parameters.publish()
    parameters.published()
    with whole_folder(to) as folder:
        write_model(model, config, _tokenizer(config), folder)
    return path


def _build(config: RunConfig) -> tuple[Any, Parameters]:
    source = find_model(config.model, weights=config.weights)
    model: Any = build_adapted(source, config.lora, seed=config.seed)
    sharding = Sharding(dtype=DTYPES[config.precision], device=torch.device("cpu"))
    return model, lay_parameters(model, SoloTransport(), sharding)


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the run's tokenizer; None: the model has none, as data of ids need none."""
    try:
        return load_tokenizer(config.tokenizer_name)
    except ConfigError:
        if config.tokenizer is not None:
            raise
        return None
