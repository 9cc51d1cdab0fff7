"""Find a model's modules, and replace its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


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


def cast_weights(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield weights inside of `modules` that torch.autocast casts wherever they are read: those of linear layers.

    Adapters of peft may read the values of their base otherwise; LoRA without DoRA does not.
    """
    for module in modules:
        given: Any = module
        kind, children = type(module).__module__, module._modules
        if kind.startswith("peft."):
            plain = kind.startswith("peft.tuners.lora.") and not any(getattr(given, "use_dora", {None: True}).values())
            children = {"base_layer": children.get("base_layer")} if plain else {}
        for child in children.values():
            if type(child) is nn.Linear and "forward" not in vars(child):
                yield child.weight
            elif child is not None:
                yield from cast_weights([child])
