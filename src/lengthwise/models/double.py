"""Keep fp64 where Hugging Face models cast to fp32, for `verify`: docs/decisions/verify-in-fp64.md."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CASTS = frozenset((Tensor.float, Tensor.to, Tensor.type))
_SOFTMAXES = frozenset((F.softmax, torch.softmax))
_PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__))


class _KeepDouble(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Check the function first: every operation of a step passes here, and reading a dtype takes longer.
        if (func in _CASTS or func in _SOFTMAXES) and args and args[0].dtype == torch.float64:
            down = func is Tensor.float or torch.float32 in (*args[1:], kwargs.get("dtype"))
            if down and func in _CASTS:
                return args[0]
            if down:
                return func(*args, **{**kwargs, "dtype": None})
        if func in _PRODUCTS and {each.dtype for each in args} == {torch.float32, torch.float64}:
            return func(*(each.double() for each in args), **kwargs)  # Gemma 4's pooling, by weights made in fp32
        return func(*args, **kwargs)


def keep_double(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Ignore casts from fp64 to fp32 inside the block, if `dtype` is fp64."""
    return _KeepDouble() if dtype == torch.float64 else nullcontext()


def as_here() -> AbstractContextManager[object]:
    """Return a context manager that keeps fp64 if the current one does, for recomputations outside of any block.

    It may be entered repeatedly, but not nested.
    """
    kept = torch.zeros((), dtype=torch.float64).float().dtype == torch.float64
    return keep_double(torch.float64 if kept else torch.float32)
