"""Costs that a user gives as a JSON file: four coefficients of the first formula of `terms`, nothing else.

What is left out is 0. Any unit of time will do, if it is one throughout.
"""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.files import read_json
from lengthwise.core.names import unknown_name
from lengthwise.core.sizes import is_number
from lengthwise.cost.terms import Cost

KEYS = ("quadratic_seconds", "linear_seconds", "fixed_seconds", "ring_seconds")
MOST_SECONDS = 1e200  # above, sums over a step would overflow


def cost_from_file(path: str | Path) -> Cost:
    """Read the coefficients of a JSON file.

    Raises:
        ConfigError: a file that cannot be read, is no JSON object, or gives no coefficient above 0; an unknown key, a
            key twice, or a coefficient that is not a number from 0 to `MOST_SECONDS`. Each names the file and the key.
        Problems: several of these.
    """
    where = str(path)
    try:
        given = read_json(path)
    except ValueError as error:
        raise _refuse(where, "a JSON file", str(error)) from None
    if not isinstance(given, dict):
        raise _refuse(where, f"an object with {', '.join(KEYS)}", type(given).__name__)
    problems: list[LengthwiseError] = [unknown_name(f"{where}: {key}", key, KEYS) for key in given if key not in KEYS]
    problems += [
        _refuse(f"{where}: {key}", f"a number of seconds from 0 to {MOST_SECONDS:g}", json.dumps(given[key])[:80])
        for key in KEYS
        if key in given and not (is_number(given[key]) and 0 <= given[key] <= MOST_SECONDS)
    ]
    if not problems and not any(given.values()):
        problems.append(_refuse(where, f"at least one of {', '.join(KEYS)} above 0", json.dumps(given)))
    raise_problems(problems)
    coefficients = {key: float(given.get(key, 0.0)) for key in KEYS}
    named = " ".join(f"{key}={value!r}" for key, value in coefficients.items() if value)
    quadratic, linear, fixed, ring = coefficients.values()
    return Cost(
        quadratic_seconds=quadratic,
        linear_seconds=linear,
        fixed_seconds=fixed,
        ring_seconds=ring,
        version=f"given/1 {named}",
    )


def _refuse(where: str, expected: str, got: str) -> ConfigError:
    return ConfigError(where, expected=expected, got=got, remedy="Fix the file of costs.")
