"""Checks of coefficients of costs, one by one."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any

from lengthwise.core.errors import ConfigError
from lengthwise.core.sizes import is_number

if TYPE_CHECKING:
    from lengthwise.cost.terms import Cost


def check_seconds(**seconds: Any) -> None:
    """Raise ConfigError if a coefficient is negative or not finite."""
    for name, value in seconds.items():
        if not is_number(value) or not 0 <= value < inf:
            raise refused(name, "a finite number of seconds, 0 or more", value, f"Give {name} in seconds.")


def check_cost(cost: Cost) -> None:
    """Raise ConfigError for an invalid coefficient, share or link, or if nothing takes time."""
    coefficients = {each.name: getattr(cost, each.name) for each in fields(cost) if each.name.endswith("_seconds")}
    check_seconds(**coefficients)
    parts = ("embedding_seconds", "head_seconds")  # of linear_seconds
    hops = cost.near.hop_seconds, cost.far.hop_seconds
    if not any((*hops, cost.ring_bytes, *(value for name, value in coefficients.items() if name not in parts))):
        remedy = "Give linear_seconds and quadratic_seconds, at least."
        raise refused("coefficients", "at least one coefficient above 0", list(coefficients.values()), remedy)
    shares = [share for _, share in cost.windows]
    if any(window < 1 for window, _ in cost.windows) or min(shares, default=0) < 0 or sum(shares) > 1 + 1e-9:
        expected = "windows of at least 1 token, and shares of the layers that sum to at most 1"
        raise refused("windows", expected, cost.windows, "Fix the windows.")
    names = ("ranks_per_node", "copy_bytes_per_second", "uplink_bytes_per_second", "heads", "kv_heads")
    numbers = {f"{name}: bytes_per_second": getattr(cost, name).bytes_per_second for name in ("near", "far")}
    for name, value in (numbers | {name: getattr(cost, name) for name in names}).items():
        if not value > 0:
            raise refused(name, "a number above 0", value, f"Fix {name}.")


def refused(name: str, expected: str, got: object, remedy: str) -> ConfigError:
    """Return the error of one coefficient."""
    return ConfigError(f"cost: {name}", expected=expected, got=repr(got), remedy=remedy)
