"""Costs to plan with, from a model and a hardware (by name or as records), or from a file.

The file is JSON with coefficients of the first formula of `terms` (default 0), in any one unit of time.
"""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.files import read_json
from lengthwise.core.names import unknown_name
from lengthwise.core.shape import ModelShape
from lengthwise.core.sizes import is_number
from lengthwise.cost.all_terms import all_terms_cost
from lengthwise.cost.analytic import analytic_cost
from lengthwise.cost.hardware import Hardware, named_hardware
from lengthwise.cost.plain import plain_cost
from lengthwise.cost.shapes import named_shape
from lengthwise.cost.terms import Cost

KEYS = ("quadratic_seconds", "linear_seconds", "fixed_seconds", "ring_seconds")
MOST_SECONDS = 1e200  # with more, sums over a step would overflow


def costs(
    model: str | ModelShape | None = None,
    hardware: str | Hardware = "h100",
    *,
    file: str | Path | None = None,
    stages: int = 1,
    simple: bool = False,
) -> Cost:
    """Return the costs, in seconds, to plan, score and simulate a step.

    Args:
        model: a named shape ("llama-7b"), the path of a Hugging Face folder or config.json, or a `ModelShape`.
        hardware: a name ("h100", "cpu"), the path of a description, or a `Hardware`.
        file: JSON file of coefficients (`lengthwise plan --cost`) in place of both, in any unit of time.
        stages: pipeline stages of a rank.
        simple: True for only five coefficients: one kind of link, no offload, no split heads.

    Raises:
        ConfigError: neither or both of model and file, an unknown name, or more stages than layers.
        Problems: several of these.
    """
    if (model is None) == (file is None):
        got = "neither" if model is None else "both"
        raise ConfigError("costs", expected="one of model and file", got=got, remedy="Give exactly one.")
    if file is not None:
        return cost_from_file(file)
    assert model is not None, "exactly one is given"
    shape = named_shape(model) if isinstance(model, str) else model
    device = named_hardware(hardware) if isinstance(hardware, str) else hardware
    return analytic_cost(shape, device) if simple else all_terms_cost(shape, device, stages=stages)


def cost_from_file(path: str | Path) -> Cost:
    """Read the coefficients of a JSON file.

    Raises:
        ConfigError: the file cannot be read, or has an unknown or repeated key, a coefficient that is not a number from
            0 to `MOST_SECONDS`, or none above 0. Names the file and the key.
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
    return plain_cost(
        quadratic_seconds=quadratic,
        linear_seconds=linear,
        fixed_seconds=fixed,
        ring_seconds=ring,
        version=f"given/1 {named}",
    )


def _refuse(where: str, expected: str, got: str) -> ConfigError:
    return ConfigError(where, expected=expected, got=got, remedy="Fix the file of costs.")
