"""What rank 0 of a session writes; what it meets is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from lengthwise.comm import Transport, from_first
from lengthwise.core.errors import LengthwiseError, OutputError
from lengthwise.models import save_model


def on_first_rank(transport: Transport, work: Callable[[], None]) -> None:
    """Do `work` on rank 0. Collective.

    Raises:
        LengthwiseError: that which it raised there, on all ranks.
    """

    def written() -> None:
        try:
            work()
        except LengthwiseError:
            raise
        except Exception as error:  # of a library; the others wait for a word
            expected, remedy, got = "to write on rank 0", "Correct what it names.", f"{type(error).__name__}: {error}"
            raise OutputError("rank 0", expected=expected, got=got, remedy=remedy) from error

    from_first(transport, written)


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
