"""What rank 0 of a session writes; what it meets is raised on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from lengthwise.comm import Transport, broadcast_bytes
from lengthwise.core.errors import OutputError
from lengthwise.models import save_model


def on_first_rank(transport: Transport, work: Callable[[], None]) -> None:
    """Do `work` on rank 0. Collective.

    Raises:
        OutputError: that which it raised there, on all ranks.
    """
    sent = b""
    if not transport.rank:
        try:
            work()
        except OutputError as error:
            sent = json.dumps([error.where, error.expected, error.got, error.remedy]).encode()
        except Exception as error:  # noqa: BLE001 - of a library; the others wait for a word
            expected, remedy = "to write on rank 0", "Correct what it names."
            sent = json.dumps(["rank 0", expected, f"{type(error).__name__}: {error}", remedy]).encode()
    sent = broadcast_bytes(transport, None if transport.rank else sent)
    if sent:
        where, expected, got, remedy = json.loads(sent)
        raise OutputError(where, expected=expected, got=got, remedy=remedy)


def saves_adapters_alone(model: nn.Module) -> bool:
    """Whether saving a model takes only what trains: peft's adapters, if all train and none is on what it saves."""
    given: Any = model
    if not hasattr(given, "peft_config"):
        return False
    words = (given.get_input_embeddings(), given.get_output_embeddings())
    prefix = getattr(given.base_model, "prefix", "lora_")
    trains = all(each.requires_grad for name, each in given.named_parameters() if prefix in name)
    return trains and not any(hasattr(each, "base_layer") for each in words)


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
