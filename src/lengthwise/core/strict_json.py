"""JSON that people write: a file or a text to plain values, and every problem in words that may follow "got".

`json` takes the last of two equal keys without a word; whoever wrote both meant one of them. Here that is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lengthwise.core.disk import read_plain


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: no file that can be read, no UTF-8, or what `parse_json` refuses; its text says which.
    """
    try:
        raw = read_plain(path)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8: byte {raw[error.start]:#04x} at offset {error.start}") from None
    return parse_json(text)


def parse_json(text: str) -> Any:
    """Parse JSON whose objects have every key once; NaN and Infinity become floats, for the caller to refuse.

    Raises:
        ValueError: broken JSON, a byte order mark, a key twice, nesting too deep to read, or an empty text.
    """
    if not text.strip():
        raise ValueError("an empty file")
    if text.startswith("\ufeff"):
        raise ValueError("a byte order mark; save it without")
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nesting too deep to read") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dictionary of an object, for `json`'s `object_pairs_hook`.

    Raises:
        ValueError: names the first key that is there twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the key "{twice}" twice in one object')
    return values


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects lie in each other more than so many levels deep."""
    inside = [value]
    for _ in range(levels + 1):
        lists = (each.values() if isinstance(each, dict) else each for each in inside if isinstance(each, dict | list))
        inside = [item for each in lists for item in each]
        if not inside:
            return False
    return True
