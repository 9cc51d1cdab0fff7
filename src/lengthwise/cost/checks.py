"""Checks of coefficients of costs, one by one."""

from __future__ import annotations

from math import inf
from typing import Any

from lengthwise.core.errors import ConfigError
from lengthwise.core.sizes import is_number


def check_seconds(**seconds: Any) -> None:
    """Raise ConfigError if a coefficient is negative or not finite."""
    for name, value in seconds.items():
        if not is_number(value) or not 0 <= value < inf:
            raise refused(name, "a finite number of seconds, 0 or more", value, f"Give {name} in seconds.")


def refused(name: str, expected: str, got: object, remedy: str) -> ConfigError:
    """Return the error of one coefficient."""
    return ConfigError(f"cost: {name}", expected=expected, got=repr(got), remedy=remedy)
