"""A model's modules, as every microbatch looks for some of them, and parameters that are put into them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List a model and all modules in it, as `model.modules()` yields them.

    Those are generators in generators: a call of Python a module and level, a quarter of a microbatch's in all.
    """
    found, left = dict[nn.Module, None](), list[nn.Module | None]([model])
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            left += reversed(module._modules.values())
    return list(found)


def replace_parameters(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Put parameters that were made anew in the place of those of these ids, tied ones in all their places."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
