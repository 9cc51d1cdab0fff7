"""Files of a trained model, for `from_pretrained`: its weights, and those of its processor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file

from lengthwise.core.errors import OutputError
from lengthwise.core.hub_access import only_cached
from lengthwise.models.text_part import left_alone, whole_model

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def save_model(model: Any, folder: Path) -> None:
    """Write config and safetensors for `from_pretrained`; only tied tensors are shared.

    A text part is written with its whole model, whose towers take its dtype.

    Raises:
        OutputError: the folder cannot be written.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state, dtype = {}, next(model.parameters()).dtype
    for tower in left_alone(model).values():
        tower.data = tower.data.to(dtype)
    model = whole_model(model)
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[key]
    try:
        model.save_pretrained(folder, state_dict=state)
    except OSError as error:
        raise unwritable(folder, "the model", error) from None


def copy_processor(model: Any, name: str, folder: Path) -> None:
    """Copy the processor's files of a model with towers from `name`.

    Raises:
        OutputError: they cannot be read or written.
    """
    if whole_model(model) is model:
        return
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "local_files_only": only_cached(name)}
    try:
        for each in _PROCESSOR_FILES:
            found = cached_file(name, each, **options)
            if found is not None:
                shutil.copyfile(found, folder / each)
    except OSError as error:
        raise unwritable(folder, f"the files of {name} beside its weights", error) from None


def unwritable(folder: Path, what: str, error: Exception) -> OutputError:
    """Return the error for a folder to which `what` cannot be written."""
    expected = f"a folder to write {what} to"
    return OutputError(str(folder), expected=expected, got=str(error), remedy="Free or repair the folder.")
