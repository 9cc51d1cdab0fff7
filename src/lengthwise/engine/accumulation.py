"""Gradients of parameters that stay in their places: what every backward makes adds up beside them, in a wide dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn


class Accumulation:
    """Lets the gradients of `parameters` add up in `sums`, of the same shapes.

    Autograd adds in place where dtypes are equal; else a hook adds what a backward made, and forgets it. made: is
    called with the number of a parameter when a backward has made its gradient.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], sums: Sequence[Tensor], *, made: Callable[[int], None] | None = None
    ) -> None:
        self._parameters, self._sums, self._made = parameters, sums, made
        self._adds = any(own.dtype != total.dtype for own, total in zip(parameters, sums, strict=True))
        self._places, self._collects = [each.data_ptr() for each in parameters], True
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._take, number))
            for number, each in enumerate(parameters if self._adds or made is not None else ())
        ]
        self.attach()

    def are_in_place(self) -> bool:
        """Return whether the parameters have the memory that they had."""
        return [each.data_ptr() for each in self._parameters] == self._places

    def attach(self) -> None:
        """Let gradients add up from now on."""
        self._collects = True
        for own, total in zip(self._parameters, self._sums, strict=True):
            own.grad = None if self._adds else total

    def detach(self) -> None:
        """Leave gradients to others until they are attached again."""
        self._collects = False
        for own in self._parameters:
            own.grad = None

    def release(self) -> None:
        """Leave gradients to others for good."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, number: int, parameter: Tensor) -> None:
        """Add what a microbatch's backward made of a parameter, unless it is somebody else's backward, or parameter."""
        if not self._collects or parameter.data_ptr() != self._places[number]:
            return
        if self._adds and parameter.grad is not None:
            self._sums[number].add_(parameter.grad)
            parameter.grad = None
        if self._made is not None:
            self._made(number)
