"""Guarded tensors that a loop finds in place of gradients and parameters that lie over the ranks.

`WithheldGradient` stands for the gradient of a model's parameter, of which each rank has a part: any use of it raises.
`Slice` is this rank's part of a parameter or of its gradient. It is used entry by entry, as the local part of a tensor
under FSDP2; what joins entries, as a norm does, raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lengthwise.core.errors import ConfigError

_OF_ATTRIBUTES = ("__get__", "__set__", "__delete__")
# Attributes that differ from the whole tensor's, or hide changes from autograd's count.
_WITHHELD = frozenset(("shape", "ndim", "data", "T", "mT", "H", "mH"))
_COPIES = frozenset(
    (
        *("copy_", "zero_", "fill_", "clone", "detach", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda"),
        *("requires_grad_", "is_floating_point", "is_complex", "element_size", "get_device", "__hash__"),
    )
)
_NOT_BY_ENTRY = {torch.Tag.reduction, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}


class WithheldGradient(Tensor):
    """A gradient without memory; any use of it by Python or by a backward raises."""

    @staticmethod
    def __new__(cls: Any, parameter: Tensor) -> Any:
        """Make the stand-in of a parameter's gradient."""
        return Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del types, args, kwargs
        remedy = "Use session.clip_grad_norm_, or the result's grad_norm; optimizer.zero_grad clears gradients."
        expected = "no use outside of the session's methods: each rank has only a part of the gradient"
        raise ConfigError("gradient of a parameter", expected=expected, got=f"{_name(func)} of it", remedy=remedy)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        del func, types, args, kwargs
        remedy = "Pass that loss to session.backward, as loss= or compute_loss=, which counts it once."
        expected = "backward by the session alone, which sums gradients over the ranks"
        raise ConfigError("backward", expected=expected, got="a backward outside of the session", remedy=remedy)


class Slice(Tensor):
    """This rank's slice of a gradient, or a tensor computed from slices. bring: function that updates its values."""

    bring: Callable[[], object] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operations by entry; refuse others."""
        del types
        name, kwargs = _name(func), kwargs or {}
        of_attribute = getattr(func, "__name__", "") in _OF_ATTRIBUTES
        if name in _WITHHELD if of_attribute else not _is_by_entry(name):
            expected = "an operation by entry: optimizer.param_groups have only this rank's slices"
            remedy = "Call session.clip_grad_norm_ for a norm of gradients; take norms and shapes of weights from the "
            remedy += "model's own parameters; change entries in place, without .data."
            where = "slices in optimizer.param_groups"
            raise ConfigError(where, expected=expected, got=f"{name} of a slice", remedy=remedy)
        slices = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Slice))
        bring = next((each.bring for each in slices if each.bring is not None), None)
        with torch._C.DisableTorchFunctionSubclass():
            if bring is not None and not of_attribute:
                bring()
            return tree_map(partial(guarded, bring=bring), func(*args, **kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return "a rank's slice"


class SliceOfParameter(Slice, nn.Parameter):
    """This rank's slice of a parameter; empty where the rank has none of it."""


def guarded(found: Any, bring: Callable[[], object] | None) -> Any:
    """Return a tensor as a `Slice` that shares its memory; other values stay."""
    if not isinstance(found, Tensor) or isinstance(found, Slice):
        return found
    made = found.as_subclass(Slice)
    made.bring = bring
    return made


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in _OF_ATTRIBUTES else name


@cache
def _is_by_entry(name: str) -> bool:
    """Return whether an operation copies entries, or torch marks it as pointwise."""
    name = name.removeprefix("_foreach_")
    if name in _COPIES:
        return True
    base = name.replace("truediv", "div").strip("_")
    names = (base, base[1:]) if name.startswith("__") else (base,)  # __imul__ is mul_
    packets = [getattr(torch.ops.aten, each) for each in names if hasattr(torch.ops.aten, each)]
    tags = {tag for packet in packets for each in packet.overloads() for tag in getattr(packet, each).tags}
    return torch.Tag.pointwise in tags and not tags & _NOT_BY_ENTRY
