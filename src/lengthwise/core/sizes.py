"""Whole numbers that users give; tokens may be written 256K or 2M, with K = 1,024 and M = 1,024 x 1,024."""

from __future__ import annotations

import operator
import re

from lengthwise.core.errors import ConfigError

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)\s*", re.IGNORECASE)
MOST = 2**53  # every JSON reader keeps numbers up to here exact
MOST_RANKS = 2**18  # on a command line: 20 times the largest planned cluster; more would take all memory
PLANNING_SHARE = 0.1  # of a step's seconds, for planning tries: ranks wait for a late plan, and planning takes a core


def parse_tokens(text: str, where: str) -> int:
    """Parse `8192`, `8K` or `1.5M` (K, M, G are binary); ConfigError unless it is whole and 1 to 2^53."""
    written = _WRITTEN.fullmatch(text)
    value = float(written[1]) * _UNITS[written[2].upper()] if written and len(written[1]) < 20 else 0.0
    if not 1 <= value <= MOST or value != int(value):
        expected = "a whole number of tokens, such as 8192, 256K or 2M (K = 1024, M = 1024 x 1024)"
        raise ConfigError(where, expected=expected, got=text.strip() or repr(text), remedy="Give such a number.")
    return int(value)


def written_tokens(tokens: int) -> str:
    """Return a number of tokens as `parse_tokens` reads it: 8K, 2M, or digits if it is not round."""
    for unit in "GMK":
        if tokens % _UNITS[unit] == 0:
            return f"{tokens // _UNITS[unit]}{unit}"
    return str(tokens)


def whole_number(value: object) -> int | None:
    """Return a whole number, NumPy's included, as an int; None for anything else, booleans too."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number; NaN and infinity are, booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_whole(name: str, value: object, *, least: int = 1, most: int = MOST) -> int:
    """Return a user's whole number as an int; ConfigError if it is not one, or out of range."""
    number = whole_number(value)
    if number is None or not least <= number <= most:
        upper = "2^53" if most == MOST else str(most)
        is_small = most == MOST and (number is None or number < least)
        expected = f"a whole number of at least {least}" if is_small else f"a whole number from {least} to {upper}"
        raise ConfigError(name, expected=expected, got=repr(value), remedy="Give such a number.")
    return number
