"""The optimizers of a loop that a session takes, which compute each entry by itself, and what they keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.models import whole_model

BY_ENTRY: Mapping[str, tuple[str, ...]] = {  # classes by the package that has them
    "torch": (
        *("AdamW", "Adam", "Adamax", "NAdam", "RAdam", "SGD", "ASGD", "RMSprop", "Rprop", "Adagrad", "Adadelta"),
    ),
    "lion_pytorch": ("Lion",),
    "lengthwise": ("Lion",),
}
_STATES = 2  # an entry, of most optimizers; amsgrad and centered keep one more
_WHY_NOT = {
    "Adafactor": "its update of an entry depends on the rows and columns of the matrix",
    "Muon": "its update of an entry depends on the whole matrix",
    "SparseAdam": "it is for sparse gradients",
    "LBFGS": "it takes several forward passes a step, and a global history",
}
_OF_FEW_BITS = "its states may be of 8 or 4 bits, which share a scale in blocks that would lie over two ranks"
_WHY_NONE_OF: Mapping[str, str] = {"bitsandbytes": _OF_FEW_BITS, "torchao": _OF_FEW_BITS}  # by package


def check_optimizer(optimizer: Any, model: nn.Module, *, offloads: bool = False) -> Optimizer:
    """Return torch's optimizer under what a library has put around it, if it can be sharded, and offloaded.

    Raises:
        ConfigError, Problems: it is of another kind, or its parameters are not those of the model that train.
    """
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer):  # as accelerate's has it
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise _refuse("a torch.optim.Optimizer", f"a {type(optimizer).__name__}")
    problems: list[LengthwiseError] = []
    kind, package = type(inner).__name__, type(inner).__module__.partition(".")[0]
    if kind not in BY_ENTRY.get(package, ()):
        known = ", ".join(f"{package}'s {' '.join(names)}" for package, names in BY_ENTRY.items() if names)
        why = _WHY_NONE_OF.get(package) or _WHY_NOT.get(kind, "it is not known to compute each entry by itself")
        expected = f"an optimizer that computes each entry by itself, so that slices change nothing: {known}"
        problems.append(_refuse(expected, f"{type(inner).__module__}.{kind}: {why}"))
    if offloads and any(group.get("capturable") for group in inner.param_groups):
        problems.append(_refuse("capturable=False beside offload_optimizer: the host updates", "True", "Take it out."))
    known = {id(each) for each in whole_model(model).parameters()}
    others = sum(id(each) not in known for group in inner.param_groups for each in group["params"])
    if others:
        problems.append(_refuse("parameters of the model alone", f"{others} that are not"))
    trained = {id(each) for group in inner.param_groups for each in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in trained]
    if left:
        got = f"{len(left)} trainable parameters in none, first {left[0]}"
        problems.append(_refuse("every trainable parameter in a group", got, "Freeze the others, or add them."))
    raise_problems(problems)
    return inner


def _refuse(expected: str, got: str, remedy: str = "Take another optimizer.") -> ConfigError:
    return ConfigError("optimizer", expected=expected, got=got, remedy=remedy)


def states_an_entry(optimizer: Optimizer) -> int:
    """Count what an optimizer keeps of each entry: two by most, and what arguments ask for beside."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in groups))
    return _STATES + any(group.get("amsgrad") or group.get("centered") for group in groups)


def plain_value(value: Any) -> Any:
    """Return an argument of a group as a number; a learning rate may be a tensor."""
    return value.tolist() if isinstance(value, Tensor) else value


def sliced(value: Any, shape: tuple[int, ...], entries: slice) -> Any:
    """Return a slice of what is kept of each entry of a parameter, and a copy of any other tensor."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(-1)[entries].clone() if tuple(value.shape) == shape else value.clone()
