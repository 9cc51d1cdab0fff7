"""Words for users: the nearest known name to an unknown one, plurals, missing packages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lengthwise.core.errors import ConfigError

BYTES_TOKENIZER = "bytes"  # one token per byte
NO_TEMPLATE = "which has no chat template"  # names a tokenizer, in the error of a row that is a chat
PLANNER_GROUP = "lengthwise.planners"  # entry points by which packages register planners
_OTHER_WORDS = {"fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "float32": "fp32", "fsdp": "zero3"}
_CLOSE = 0.5  # difflib's similarity, 0 to 1; `trian` and `train` have 0.8
_SHORT = 4  # letters; a name this short must share its first letter: `a100` is not `h100`


def nearest_name(name: object, known: Iterable[str], *, close: float = _CLOSE) -> str | None:
    """Return the known name nearest to `name`, or None if none is as near as `close`."""
    typed, known = str(name), sorted(known)
    if _OTHER_WORDS.get(typed) in known:
        return _OTHER_WORDS[typed]
    near = difflib.get_close_matches(typed, known, n=1, cutoff=close)
    if not near or (len(typed) <= _SHORT and near[0][0] != typed[0]):
        return None
    return near[0]


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """Return "Did you mean `x`?" for the known name nearest to `name`, or None if none is near."""
    near = nearest_name(name, known)
    return None if near is None else f"Did you mean `{near}`?"


def unknown_name(where: str, got: object, known: Iterable[str], *, others: str = "") -> ConfigError:
    """Return the error for an unknown name, with the known ones and the nearest. others: further choices."""
    names = list(known)
    remedy = did_you_mean(got, names) or "Choose one of these."
    expected = f"one of {', '.join(names)}{', ' * bool(others)}{others}"
    return ConfigError(where, expected=expected, got=repr(got), remedy=remedy)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 2 ranks, 2 batches, 3 processes."""
    plural = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{plural}"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return the message for a missing package that training needs, or None for any other package."""
    if error.name not in ("torch", "transformers", "safetensors"):
        return None
    return f"expected torch, transformers and safetensors; got no {error.name}"
