"""A session in a folder: the model as Hugging Face writes it, and what the loop goes on from, in safetensors and JSON.

Rank 0 writes and reads; what it meets is raised on every rank.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lengthwise.checkpoint.part import sha256_of
from lengthwise.comm import Transport, broadcast_bytes
from lengthwise.core.disk import make_readable, sync
from lengthwise.core.errors import OutputError
from lengthwise.core.strict_json import read_json
from lengthwise.models import save_model
from lengthwise.session.state import plain_values

Result = TypeVar("Result")
MODEL, TENSORS, REST = "model", "state.safetensors", "state.json"
_FORMAT = 1
_MASTERS, _STATES = "master_weights", "optimizer"


def on_first_rank(transport: Transport, work: Callable[[], Result]) -> Result | None:
    """Return what `work` does on rank 0, None on others. Collective.

    Raises:
        OutputError: that which it raised there, on all ranks.
    """
    result, told = None, b""
    if not transport.rank:
        try:
            result = work()
        except OutputError as error:
            told = json.dumps([error.where, error.expected, error.got, error.remedy]).encode()
        except Exception as error:  # noqa: BLE001 - of a library; the others wait for a word
            expected, remedy = "to write or read on rank 0", "Correct what it names."
            told = json.dumps(["rank 0", expected, f"{type(error).__name__}: {error}", remedy]).encode()
    told = broadcast_bytes(transport, None if transport.rank else told)
    if told:
        where, expected, got, remedy = json.loads(told)
        raise OutputError(where, expected=expected, got=got, remedy=remedy)
    return result


def write_session(folder: Path, model: Any, state: Mapping[str, Any]) -> None:
    """Write a `state_dict` and its model into a new folder, which is whole or not there.

    Raises:
        OutputError: it is there, or cannot be written.
    """
    if folder.exists():
        remedy = "Give each step a folder of its own, or delete this one."
        raise OutputError(str(folder), expected="a new folder", got="one that is there", remedy=remedy)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_model(model, unfinished / MODEL)
        optimizer = state["optimizer"]
        tensors = {f"{_MASTERS}/{name}": each for name, each in state["master_weights"].items()}
        for number, values in optimizer["state"].items():
            tensors |= {f"{_STATES}/{number}/{key}": torch.as_tensor(value) for key, value in values.items()}
        save_file({name: each.contiguous() for name, each in tensors.items()}, unfinished / TENSORS)
        make_readable(unfinished / TENSORS)
        rest = {
            "format": _FORMAT,
            "sha256": sha256_of(unfinished / TENSORS),
            "steps": state["steps"],
            "param_groups": plain_values(optimizer["param_groups"]),
        }
        (unfinished / REST).write_text(json.dumps(rest, indent=1) + "\n", encoding="utf-8")
        for path in (unfinished / TENSORS, unfinished / REST, unfinished):
            sync(path)
        os.rename(unfinished, folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            str(folder), expected="a folder that can be written", got=f"{error}", remedy="Free or repair the disk."
        ) from None


def read_session(folder: Path) -> dict[str, Any]:
    """Return what `write_session` was given of a session.

    Raises:
        OutputError: it is not there, or not what was written.
    """
    weights, states = dict[str, Tensor](), dict[int, dict[str, Tensor]]()
    try:
        rest = read_json(folder / REST)
        if rest["format"] != _FORMAT:
            raise _other(folder / REST, f"format {_FORMAT}", f"{rest['format']}")
        if (digest := sha256_of(folder / TENSORS)) != rest["sha256"]:
            raise _other(folder / TENSORS, f"SHA-256 {rest['sha256'][:16]}...", f"{digest[:16]}...")
        groups = [dict(each) for each in rest["param_groups"]]
        for name, each in load_file(folder / TENSORS).items():
            kind, key, *more = name.split("/", 2 if name.startswith(_STATES) else 1)
            if kind == _MASTERS:
                weights[key] = each
            else:
                states.setdefault(int(key), {})[more[0]] = each
        steps = int(rest["steps"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else f"{error}"
        raise _other(folder, "what session.save wrote", got) from None
    return {"steps": steps, "optimizer": {"state": states, "param_groups": groups}, "master_weights": weights}


def write_model(model: nn.Module, folder: Path) -> None:
    """Write a model, or peft's adapters, as `save_pretrained` does.

    Raises:
        OutputError: it cannot be written.
    """
    given: Any = model
    if folder.is_file():
        remedy = "Give another path."
        raise OutputError(str(folder), expected="a folder", got="a file", remedy=remedy)
    try:
        if hasattr(given, "peft_config"):
            given.save_pretrained(folder)
        else:
            save_model(given, folder)
    except (OSError, SafetensorError) as error:
        remedy = "Free or repair the disk."
        raise OutputError(str(folder), expected="a folder that can be written", got=f"{error}", remedy=remedy) from None


def _other(path: Path, expected: str, got: str) -> OutputError:
    return OutputError(str(path), expected=expected, got=got, remedy="Take another folder, or start anew.")
