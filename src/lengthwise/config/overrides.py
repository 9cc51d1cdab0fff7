"""`--set a.b=value`: changes to the raw values of a run file, before anything is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lengthwise.config.document import parse_values
from lengthwise.core.errors import ConfigError

_MOST_DIGITS = 10  # of an index


def apply_overrides(values: dict[str, object], overrides: Sequence[str]) -> list[ConfigError]:
    """Write each override into `values`, in order, the last one winning; return what could not be written.

    Keys are joined by dots; a number is the index of an existing list entry. Missing sections and unknown keys are
    made.
    """
    problems: list[ConfigError] = []
    for override in overrides:
        where = f"overrides {override}"
        key, equals, text = override.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path):
            remedy = "Write for example optimizer.lr=3e-4."
            problems.append(ConfigError(where, expected="key=value", got=repr(override), remedy=remedy))
            continue
        try:
            value, found = parse_values(text, where)
            problems += found
            _write(values, path, value)
        except ConfigError as error:
            problems.append(error)
    return problems


def _write(values: dict[str, object], path: Sequence[str], value: object) -> None:
    target: Any = values  # a mapping, or inside one a list; `_step` gives the key or the index to match
    for depth, part in enumerate(path):
        step = _step(target, part, path[: depth + 1])
        if depth == len(path) - 1:
            target[step] = value
            return
        below = target[step] if isinstance(target, list) else target.get(step)
        if below is None:
            below = {}
            target[step] = below
        if not isinstance(below, dict | list):
            prefix = ".".join(path[: depth + 1])
            where, expected = f"overrides {'.'.join(path)}", f"`{prefix}` to have keys"
            raise ConfigError(where, expected=expected, got=f"the value {below!r}", remedy=f"Set `{prefix}` itself.")
        target = below


def _step(target: dict | list, part: str, path: Sequence[str]) -> Any:
    if isinstance(target, dict):
        return part
    if part.isascii() and part.isdecimal() and len(part) < _MOST_DIGITS and int(part) < len(target):
        return int(part)
    expected = f"an index from 0 to {len(target) - 1}" if target else "a list with entries"
    remedy = f"Name an entry that the run file has, or set `{'.'.join(path[:-1])}` as a whole."
    raise ConfigError(f"overrides {'.'.join(path)}", expected=expected, got=repr(part), remedy=remedy)
