"""Find a model's modules, and replace its parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List a model and all its modules, in the order of `model.modules()`.

    Every microbatch calls it, and nested generators would make a quarter of a microbatch's Python calls.
    """
    found, left = dict[nn.Module, None](), list[nn.Module | None]([model])
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            left += reversed(module._modules.values())
    return list(found)


def replace_parameters(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters of these ids, tied ones in all their places."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
