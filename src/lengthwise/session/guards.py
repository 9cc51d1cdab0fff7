"""Guarded tensors that a loop finds in place of gradients and parameters that lie over the ranks.

`WithheldGradient` stands for the gradient of a model's parameter, of which each rank has a part: any use of it raises.
`Slice` is this rank's part of a parameter in the optimizer's groups, `SliceGradient` that part's gradient. Operations
by entry give the same on a slice as on the whole tensor, so they are allowed, and counted if they change entries. A
norm, a mean or a shape of a slice differs from the whole tensor's, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError

GRADIENTS, WEIGHTS = "gradients", "weights"
_P = ParamSpec("_P")
_T = TypeVar("_T")


class WithheldGradient(Tensor):
    """A gradient without memory; any use of it raises, by Python or by a backward that adds to it."""

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


class SliceOwner(Protocol):
    """The owner of slices. kind: gradients or weights."""

    def before_use(self, kind: str) -> None:
        """Bring the slices of a kind up to date; called before any use."""
        ...

    def changed(self, kind: str) -> None:
        """Count a change of entries; called after it."""
        ...


class _Guarded(Tensor):
    """A tensor that allows only operations by entry. owner: None for tensors that were computed from slices."""

    owner: SliceOwner | None = None
    kind: str = GRADIENTS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operations by entry, and count those that change slices.

        Raises:
            ConfigError: another operation.
        """
        del types
        name, given = _name(func), [*args, *(kwargs or {}).values()]
        guarded = list(_guarded(given))
        if name not in _ALLOWED:
            kind = guarded[0].kind if guarded else WEIGHTS
            expected = "an operation by entry: optimizer.param_groups have only this rank's slices"
            where, remedy = f"{kind} in optimizer.param_groups", _REMEDIES[kind]
            raise ConfigError(where, expected=expected, got=f"{name} of a slice", remedy=remedy)
        _refuse_whole(name, given, guarded)
        for kind, owner in _owners(guarded):
            if name not in _METADATA:
                owner.before_use(kind)
        sets_data = name == "data" and func.__name__ == "__set__"
        with torch._C.DisableTorchFunctionSubclass():
            # The memory stays that of the slice.
            found = args[0].detach().copy_(args[1]) if sets_data else func(*args, **(kwargs or {}))
        written = [(kwargs or {}).get("out")]
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _OPERATORS_IN_PLACE
        if (is_in_place and name not in _METADATA) or sets_data:
            written.append(given[0])
        if any(each is not None for each in written):
            for kind, owner in _owners(_guarded(written)):
                owner.changed(kind)
            return None if sets_data else found
        alias = guarded[0] if name in _ALIASES else None
        return found if name in _METADATA else _as_guarded(found, guarded[0].kind, alias)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"a rank's slice of {self.kind}"


class SliceGradient(_Guarded):
    """This rank's slice of a gradient, or a tensor computed from slices."""


class Slice(_Guarded, nn.Parameter):
    """This rank's slice of a parameter; empty where the rank has none of it."""


def guarded_slice(owner: SliceOwner, weights: Tensor) -> Slice:
    """Return a slice of a parameter that shares the memory of `weights`, (entries,)."""
    made = Slice(weights)
    made.owner, made.kind = owner, WEIGHTS
    return made


def guarded_gradient(owner: SliceOwner, gradient: Tensor) -> SliceGradient:
    """Return a slice of a gradient that shares the memory of `gradient`, (entries,)."""
    made = gradient.as_subclass(SliceGradient)
    made.owner = owner
    return made


def by_owner(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method of the slices' owner use them unguarded, which costs a tenth of a guarded use."""

    @wraps(method)
    def unguarded(*args: _P.args, **options: _P.kwargs) -> _T:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **options)

    return unguarded


def is_guarded(value: object) -> bool:
    """Return whether a value is a slice, or was computed from slices."""
    return isinstance(value, _Guarded)


def plain(values: Tensor) -> Tensor:
    """Return a slice as a tensor that is not guarded."""
    with torch._C.DisableTorchFunctionSubclass():
        return values.detach().as_subclass(Tensor)


def _name(func: Any) -> str:
    """Return the name of the function or attribute that torch calls."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name


def _guarded(values: Any) -> Iterator[_Guarded]:
    for each in values:
        if isinstance(each, _Guarded):
            yield each
        elif isinstance(each, list | tuple):
            yield from _guarded(each)


def _owners(guarded: Iterable[_Guarded]) -> list[tuple[str, SliceOwner]]:
    return list({each.kind: (each.kind, each.owner) for each in guarded if each.owner is not None}.values())


def _refuse_whole(name: str, given: Sequence[Any], guarded: Sequence[_Guarded]) -> None:
    """Refuse an operation of a slice and a tensor of another shape, such as a whole parameter's."""
    entries = {tuple(_shape(each)) for each in guarded}
    others = [
        tuple(each.shape)
        for each in given
        if isinstance(each, Tensor) and not isinstance(each, _Guarded | WithheldGradient) and each.numel() != 1
    ]
    wrong = next((shape for shape in others if shape not in entries), None)
    if wrong is not None and guarded:
        expected = "numbers, or tensors computed from slices: a slice has this rank's entries, in one dimension"
        remedy = "Write to the model's own parameters between steps, or change the loss."
        where = f"{guarded[0].kind} in optimizer.param_groups"
        raise ConfigError(where, expected=expected, got=f"{name} with a tensor {wrong}", remedy=remedy)


def _shape(values: Tensor) -> Sequence[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return values.shape


def _as_guarded(found: Any, kind: str, alias: _Guarded | None) -> Any:
    """Guard a result computed from slices; changes of an alias count as changes of its slice."""
    if isinstance(found, list | tuple):
        return type(found)(_as_guarded(each, kind, None) for each in found)
    if not isinstance(found, Tensor) or isinstance(found, _Guarded):
        return found
    with torch._C.DisableTorchFunctionSubclass():
        made = found.as_subclass(SliceGradient)
    made.kind, made.owner = kind, None if alias is None else alias.owner
    return made


_REMEDIES = {
    GRADIENTS: "Call session.clip_grad_norm_ for a norm over all ranks, or use the result's grad_norm.",
    WEIGHTS: "Take norms and shapes of the model's own parameters, or of session.state_dict's.",
}
_METADATA = frozenset(
    (
        *("grad", "device", "dtype", "layout", "requires_grad", "requires_grad_", "is_leaf", "grad_fn", "_version"),
        *(
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_mps",
            "is_xpu",
            "is_sparse",
            "is_quantized",
            "is_nested",
            "is_contiguous",
        ),
        *("is_floating_point", "is_complex", "element_size", "itemsize", "get_device", "_backward_hooks", "__hash__"),
    )
)
_ALIASES = frozenset(("data", "detach"))
_BY_ENTRY = (
    *("add", "sub", "mul", "div", "neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "pow", "square", "exp", "log"),
    *("lerp", "addcmul", "addcdiv", "clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "nan_to_num"),
    *("masked_fill", "floor", "ceil", "round", "trunc", "sigmoid", "tanh", "true_divide", "multiply"),
)
_IN_PLACE = tuple(f"{name}_" for name in (*_BY_ENTRY, "copy", "zero", "fill"))
_FOREACH = tuple(f"_foreach_{name}" for name in (*_BY_ENTRY, *_IN_PLACE))
_OPERATORS = ("add", "sub", "mul", "truediv", "div", "pow")
_OPERATORS_IN_PLACE = frozenset(f"__i{name}__" for name in _OPERATORS)
_OTHERS = (
    *("clone", "isfinite", "isnan", "isinf", "where", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "to", "type"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "float", "double", "half", "bfloat16", "cpu", "cuda"),
    *(f"__{side}{name}__" for name in (*_OPERATORS, "neg") for side in ("", "r")),
    *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")),
)
_ALLOWED = _METADATA | _ALIASES | _OPERATORS_IN_PLACE | {*_BY_ENTRY, *_IN_PLACE, *_FOREACH, *_OTHERS}
