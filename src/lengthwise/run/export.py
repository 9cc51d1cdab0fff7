"""Export a checkpoint of a run as a model folder, in one process, without the run's data."""

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
from lengthwise.engine.parameters import Parameters, lay_parameters
from lengthwise.engine.slices import Sharding
from lengthwise.models import DTYPES, build_adapted, copy_processor, find_model, save_adapter, save_model
from lengthwise.run.folder import CONFIG
from lengthwise.run.resume import FOLDER, model_settings, run_settings

_ANOTHER = "Take another checkpoint, with {step}."


def write_model(model: Any, config: RunConfig, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the trained model, or its adapter, and the tokenizer as a Hugging Face folder."""
    if tokenizer is not None:
        _set_special_tokens(model, tokenizer.special_ids())
    save = save_model if config.lora is None else save_adapter
    save(model, folder)
    if config.lora is None:
        copy_processor(model, config.model, folder)
    if tokenizer is not None:
        tokenizer.save(folder)


def _set_special_tokens(model: Any, special_ids: Mapping[str, Sequence[int]]) -> None:
    """Set the tokenizer's special tokens in the model's configs, as transformers' Trainer does, and the template's end.

    End tokens already in the generation config, or in a list of several, stay.
    """
    generation = getattr(model, "generation_config", None)
    for config in filter(None, (model.config.get_text_config(), generation)):
        for key, own in special_ids.items():
            value = getattr(config, key, None)
            there = value if isinstance(value, list) else [value] if config is generation and value is not None else []
            ids = [*own, *(each for each in there if each not in own)] if key == "eos_token_id" else own
            setattr(config, key, ids[0] if len(ids) == 1 else ids)


def chosen_checkpoint(output: Path, step: int | None) -> tuple[Path, RunManifest]:
    """Return a run's checkpoint after `step`, or the newest whose files have the right sizes."""
    folder = CheckpointFolder(output / FOLDER)
    if step is None:
        path, manifest, _ = folder.newest()
        return path, manifest
    if step not in folder.steps():
        there = ", ".join(map(str, folder.steps())) or "none"
        expected = f"a checkpoint after step {step}"
        raise OutputError(str(folder.path), expected=expected, got=f"checkpoints after {there}", remedy=_ANOTHER)
    return folder.at(step), read_run_manifest(folder.at(step))


def export_checkpoint(output: Path, to: Path, *, step: int | None = None) -> Path:
    """Write a checkpoint's model into the new folder `to`, as at the end of a run; return the checkpoint's path.

    output: the run's folder, with its `config.yaml`. The model's tokenizer, if it has one, is written too.
    """
    path, manifest = chosen_checkpoint(output, step)
    if to.exists():
        raise OutputError(str(to), expected="a new folder", got="an existing one", remedy="Choose another {to}.")
    config = load_config(output / CONFIG)
    other = changed(model_settings(manifest.run), model_settings(run_settings(config)))
    if other:
        expected, remedy = "the settings that the checkpoint was saved with", "Put the run's own config.yaml back."
        raise OutputError(str(output / CONFIG), expected=expected, got="; ".join(other), remedy=remedy)
    found = broken(path, manifest)
    if found is not None:
        raise OutputError(str(path), expected="undamaged files", got=found, remedy=_ANOTHER)
    model, parameters = _build(config)
    dtype = str(parameters.master_weights.dtype).removeprefix("torch.")
    wrong = differences(manifest, parameters.names, parameters.shapes, dtype)
    if wrong:
        remedy = "Restore the model that the run began with."
        raise OutputError(str(path), expected=f"parameters of {config.model}", got="; ".join(wrong[:8]), remedy=remedy)
    found = unfit(path, manifest, parameters.state())
    if found is not None:
        raise OutputError(str(path), expected="states that a run can continue from", got=found, remedy=_ANOTHER)
    read_state(path, manifest, parameters.layout, parameters.names, 0, parameters.state())
    parameters.publish()
    parameters.published()
    with whole_folder(to) as folder:
        write_model(model, config, _tokenizer(config), folder)
    return path


def _build(config: RunConfig) -> tuple[Any, Parameters]:
    source = find_model(config.model, weights=config.weights, train_towers=config.train_towers)
    model: Any = build_adapted(source, config.lora, seed=config.seed)
    sharding = Sharding(dtype=DTYPES[config.precision], device=torch.device("cpu"))
    return model, lay_parameters(model, SoloTransport(), sharding)


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the run's tokenizer, or None if the model has none, because data of ids need none."""
    try:
        return load_tokenizer(config.tokenizer_name)
    except ConfigError:
        if config.tokenizer is not None:
            raise
        return None
