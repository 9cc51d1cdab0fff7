"""The optimizers that a session accepts from a loop: those that compute each entry by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.models import whole_model

_BY_ENTRY: Mapping[str, tuple[str, ...]] = {  # classes by package
    "torch": ("AdamW", "Adam", "Adamax", "NAdam", "RAdam", "SGD", "ASGD", "RMSprop", "Rprop", "Adagrad", "Adadelta"),
    "lion_pytorch": ("Lion",),
    "lengthwise": ("Lion",),
}
_WHY_NOT = {
    "Adafactor": "its update of an entry depends on the rows and columns of the matrix",
    "Muon": "its update of an entry depends on the whole matrix",
    "SparseAdam": "it is for sparse gradients",
    "LBFGS": "it takes several forward passes a step, and a global history",
}
_OF_FEW_BITS = "its states may have 8 or 4 bits and share a scale in blocks, which could lie over two ranks"
_WHY_NONE_OF: Mapping[str, str] = {"bitsandbytes": _OF_FEW_BITS, "torchao": _OF_FEW_BITS}  # by package


def check_optimizer(optimizer: Any, model: nn.Module, *, offloads: bool = False, is_given: bool = True) -> Optimizer:
    """Check a loop's optimizer; return the torch optimizer inside a library's wrap.

    is_given: True if the loop gave the model, too; if not, only the session can make the optimizer.
    """
    if not is_given:
        expected, remedy = "values of a run file's optimizer, for a StoredModel", 'Give {"name": "adamw"}.'
        raise _refuse(expected, f"a {type(optimizer).__name__}", remedy)
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer):  # accelerate's wrap
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise _refuse("a torch.optim.Optimizer", f"a {type(optimizer).__name__}")
    problems: list[LengthwiseError] = []
    kind, package = type(inner).__name__, type(inner).__module__.partition(".")[0]
    if kind not in _BY_ENTRY.get(package, ()):
        known = ", ".join(f"{package}'s {' '.join(names)}" for package, names in _BY_ENTRY.items())
        why = _WHY_NONE_OF.get(package) or _WHY_NOT.get(kind, "it is not known to compute each entry by itself")
        expected = f"an optimizer that computes each entry by itself, so that slices are exact: {known}"
        problems.append(_refuse(expected, f"{type(inner).__module__}.{kind}: {why}"))
    if offloads and any(group.get("capturable") for group in inner.param_groups):
        expected = "capturable=False, as the host updates with offload_optimizer"
        problems.append(_refuse(expected, "capturable=True", "Remove capturable."))
    known = {id(each) for each in whole_model(model).parameters()}
    others = sum(id(each) not in known for group in inner.param_groups for each in group["params"])
    if others:
        problems.append(_refuse("the model's parameters alone", f"{others} other parameters"))
    trained = {id(each) for group in inner.param_groups for each in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in trained]
    if left:
        got = f"{len(left)} trainable parameters in no group, the first {left[0]}"
        problems.append(_refuse("every trainable parameter in a group", got, "Freeze or add them."))
    raise_problems(problems)
    return inner


def _refuse(expected: str, got: str, remedy: str = "Take another optimizer.") -> ConfigError:
    return ConfigError("optimizer", expected=expected, got=got, remedy=remedy)
