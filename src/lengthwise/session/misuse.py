"""Checks of the arguments of a session's methods, and of the torch modes around a call.

One table has the allowed values of every argument; rules over several arguments are checked elsewhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError, raise_problems

_MOST = 10**300  # bound on whole numbers, so that a float can hold them
_LONGEST = 1e8  # seconds; the system's clocks overflow on much larger ones

Kind: TypeAlias = tuple[Callable[[Any], bool], str]
"""A test of values, and a description of the values that pass."""


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python, NumPy or torch that fits a float; True and False are not."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta or value.dtype == torch.bool)
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return not isinstance(value, int) or -_MOST < value < _MOST


def _is_usable(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _is_iterable(value: object) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _takes(count: int, value: object) -> bool:
    """Return whether a value is a function of `count` arguments, as far as its signature is known."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


def _function(*arguments: str) -> Kind:
    return partial(_takes, len(arguments)), f"a function of {' and '.join(arguments)}"


def _or_none(kind: Kind) -> Kind:
    return lambda value: value is None or kind[0](value), f"{kind[1]}, or None"


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "model": (lambda value: isinstance(value, nn.Module), "a Hugging Face causal language model"),
        "seed": (lambda value: is_whole(value) and 0 <= value < 1 << 63, "a whole number from 0 to 2**63 - 1"),
        "timeout_seconds": (lambda value: is_number(value) and 0 < value <= _LONGEST, "seconds, more than 0"),
        "loss": _or_none(_function("outputs", "tokens")),
        "compute_loss": _or_none(_function("model", "inputs")),
        "combine": _function("the values"),
        "values": _or_none(_function("outputs", "tokens")),
        "per": (lambda value: isinstance(value, str) and value in ("sequence", "token"), "sequence or token"),
        "normalizer": (
            lambda value: value is None or (is_number(value) and 0 < float(value) < math.inf),
            "a finite normalizer above 0",
        ),
        "limit": (lambda value: is_number(value) and float(value) >= 0, "a number of 0 or more"),
        "batches": (_is_iterable, "an iterable of lists of rows"),
        "folder": (lambda value: isinstance(value, str | Path) and str(value) != "", "a path"),
        "background": (lambda value: isinstance(value, bool), "True or False"),
        "numbers": (_is_usable, "a dense tensor with values"),
    }
)


def check_kinds(**given: object) -> None:
    """Check arguments, given by name, against `KINDS`; one message has all problems."""
    raise_problems(
        [
            ConfigError(name, expected=KINDS[name][1], got=shown(value), remedy=f"Correct {name}.")
            for name, value in given.items()
            if not KINDS[name][0](value)
        ]
    )


def shown(value: object) -> str:
    """Return a short text of a value for an error; of a tensor its shape, of other objects their type."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return f"{value.item()!r}"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, str | bytes | Real | torch.device):
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


def refuse_modes(what: str, cast: torch.dtype | None) -> None:
    """Refuse to train inside a block without gradients or with fp16. cast: dtype of mixed precision, or None."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        got = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        remedy = "Call it outside of that block, or use evaluate."
        raise ConfigError(what, expected="enabled gradients", got=got, remedy=remedy)
    if cast == torch.float16:
        expected, got = "no torch.autocast, or one to bfloat16", "torch.autocast to float16"
        raise ConfigError(what, expected=expected, got=got, remedy="fp16 needs a loss scale; use bfloat16.")
