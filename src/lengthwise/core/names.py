"""Words for users: names that they typed and nobody knows, with the nearest known one; one thing, or several."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lengthwise.core.errors import ConfigError

BYTES_TOKENIZER = "bytes"  # one token a byte
NO_TEMPLATE = "which has no chat template"  # of a tokenizer, in the error of a row that is a chat
PLANNER_GROUP = "lengthwise.planners"  # of entry points, in which packages name planners of theirs
_OTHER_WORDS = {"fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "float32": "fp32", "fsdp": "zero3"}
_CLOSE = 0.5  # of difflib's similarity, 0 to 1; `trian` and `train` have 0.8
_SHORT = 4  # letters, of which another first one makes another name: `a100` is no `h100`


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to `name`; None where none is near."""
    typed, known = str(name), sorted(known)
    if _OTHER_WORDS.get(typed) in known:
        return _OTHER_WORDS[typed]
    close = difflib.get_close_matches(typed, known, n=1, cutoff=_CLOSE)
    if not close or (len(typed) <= _SHORT and close[0][0] != typed[0]):
        return None
    return close[0]


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """Return the question for the known name that is nearest to `name`; None where none is near."""
    near = nearest_name(name, known)
    return None if near is None else f"Did you mean `{near}`?"


def unknown_name(where: str, got: object, known: Iterable[str], *, others: str = "") -> ConfigError:
    """Return the error for an unknown name: the known ones and the nearest; `others`: what else may be given."""
    names = list(known)
    remedy = did_you_mean(got, names) or "Choose one of these."
    expected = f"one of {', '.join(names)}{', ' * bool(others)}{others}"
    return ConfigError(where, expected=expected, got=repr(got), remedy=remedy)


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 rank, 2 ranks, 2 batches, 3 processes."""
    plural = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{plural}"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Say what training needs where it is not installed; None if something else could not be imported."""
    if error.name not in ("torch", "transformers", "safetensors"):
        return None
    return f"expected torch, transformers and safetensors; got no {error.name}"
