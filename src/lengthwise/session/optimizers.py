"""The optimizers of a loop that a session takes: those that compute each entry by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
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
