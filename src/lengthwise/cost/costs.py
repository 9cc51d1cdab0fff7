"""Costs to plan with, from what a user has: a model and a hardware by name, records of them, or a file."""

from __future__ import annotations

from pathlib import Path

from lengthwise.core.errors import ConfigError
from lengthwise.core.shape import ModelShape
from lengthwise.cost.all_terms import all_terms_cost
from lengthwise.cost.analytic import analytic_cost
from lengthwise.cost.given import cost_from_file
from lengthwise.cost.hardware import Hardware, named_hardware
from lengthwise.cost.shapes import named_shape
from lengthwise.cost.terms import Cost


def costs(
    model: str | ModelShape | None = None,
    hardware: str | Hardware = "h100",
    *,
    file: str | Path | None = None,
    tensor: int = 1,
    stages: int = 1,
    simple: bool = False,
) -> Cost:
    """Make the costs, in seconds, that a step is planned, scored and simulated with.

    Args:
        model: a named shape ("llama-7b"), the path of a Hugging Face folder or config.json, or a `ModelShape`.
        hardware: a named one ("h100", "cpu"), the path of a description, or a `Hardware`.
        file: in place of both, a JSON file of coefficients (`lengthwise plan --cost`), in any unit of time.
        tensor: devices that split each layer of a rank.
        stages: pipeline stages of a rank.
        simple: five coefficients alone: no links, offload, heads or stages.

    Raises:
        ConfigError: neither or both of model and file, an unknown name, or a mesh that the model does not allow.
        Problems: several of these.
    """
    if (model is None) == (file is None):
        got = "neither" if model is None else "both"
        raise ConfigError("costs", expected="one of model and file", got=got, remedy="Give exactly one.")
    if file is not None:
        return cost_from_file(file)
    assert model is not None, "one of the two was checked to be given"
    shape = named_shape(model) if isinstance(model, str) else model
    device = named_hardware(hardware) if isinstance(hardware, str) else hardware
    return analytic_cost(shape, device) if simple else all_terms_cost(shape, device, tensor=tensor, stages=stages)
