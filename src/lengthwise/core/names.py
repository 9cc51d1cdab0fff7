"""Words for users: names that they typed and nobody knows, with the nearest known one; one thing, or several."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lengthwise.core.errors import ConfigError

_CLOSE = 0.5  # of difflib's similarity, 0 to 1; `trian` and `train` have 0.8


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """Ask for the known name that is nearest to `name`; None where none is near."""
    close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=_CLOSE)
    return f"Did you mean `{close[0]}`?" if close else None


def unknown_name(where: str, got: object, known: Iterable[str], *, others: str = "") -> ConfigError:
    """Make the error for a name that does not exist: it lists the known ones and points at the nearest.

    `others`: what can be given besides names, "or the path of a file" for example.
    """
    names = list(known)
    remedy = did_you_mean(got, names) or "Choose one of these."
    expected = f"one of {', '.join(names)}{', ' * bool(others)}{others}"
    return ConfigError(where, expected=expected, got=repr(got), remedy=remedy)


def counted(number: int, noun: str) -> str:
    """Write a number of things: 1 rank, 2 ranks, 2 batches."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
