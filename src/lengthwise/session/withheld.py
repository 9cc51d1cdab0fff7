"""Stands in the place of gradients that lie over the ranks, so that nobody takes this rank's part for the whole.

After a backward a parameter's `grad` would be this rank's share, or nothing: torch's own clipping of it would change no
slice, and its norm would differ by rank, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError


class _Withheld(Tensor):
    """A tensor that any use of raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del types, args, kwargs
        remedy = "Use session.clip_grad_norm_, or the result's grad_norm; optimizer.zero_grad clears gradients."
        expected, got = "no use of it between two backward passes: each rank has only a part", f"{func.__name__} of it"
        raise ConfigError("gradient of a parameter", expected=expected, got=got, remedy=remedy)


class WithheldGradients:
    """The gradients of parameters that were taken out of reach."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Parameter, Tensor | None]] = []

    def withhold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put what raises in the place of gradients."""
        for each in parameters:
            self._kept.append((each, each.grad))
            stands = torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape)
            each.grad = stands.as_subclass(_Withheld)  # expanded: one number, whatever the shape

    def give_back(self) -> None:
        """Put the gradients back where nobody has cleared or replaced them."""
        for parameter, gradient in self._kept:
            if isinstance(parameter.grad, _Withheld):
                parameter.grad = gradient
        self._kept.clear()
