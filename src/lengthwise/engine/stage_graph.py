"""The graph of a chunk of layers between its forward and its backward: its two ends, which hold no hidden states.

A leaf that received them, and the output that was given on, would keep both on the device until backward; what a layer
needs of them autograd has saved, and the plan may have it offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lengthwise.offload import ActivationSaver


@dataclass(slots=True, kw_only=True)
class KeptForward:
    """What backward needs of a forward of so many rows.

    end: the loss, or a number whose backward takes what is in `after`, the gradient of what was given on. before: gets
    the gradient of what came in; None: ids did. router_logits: where routers have a balance loss. router_share: its
    part of that, once all choices are counted.
    """

    rows: int
    end: Tensor
    after: list[Tensor]
    before: list[Tensor] | None
    router_logits: list[Tensor]
    saver: ActivationSaver | None
    router_share: Tensor | None = None


class _Received(torch.autograd.Function):
    """Where a graph begins at hidden states, whose gradient goes into `gradients`; it does not hold them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _begin: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.gradients.extend(gradients)
        return None, None, None


class _GivenOn(torch.autograd.Function):
    """Where a graph ends at hidden states, whose gradient comes from `gradients`; it does not hold them."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.pop(), None


def received(hidden: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return hidden states as the beginning of a graph, whose backward adds their gradient to a list."""
    begin = torch.empty(0, device=hidden.device, requires_grad=True)
    return _Received.apply(hidden, begin, gradients)  # type: ignore[return-value]


def given_on(output: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return a number, (), whose backward takes the gradient of `output` from a list."""
    return _GivenOn.apply(output, gradients)  # type: ignore[return-value]
