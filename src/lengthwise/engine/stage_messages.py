"""Hidden states between the stages of a pipeline: their messages, and the autograd graph of a chunk around them.

Hidden states go to the next chunk, gradients back to the previous one. The messages of a turn are one grouped call; a
pass waits for its message, which was posted turns ago, and a rank waits from time to time for what it has sent.

The graph of a chunk holds neither its input nor its output until backward: a leaf or an output would keep hidden states
on the device, while autograd saves what layers need, and the plan may offload that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Mesh, Pending
from lengthwise.core.shape import LayerCut
from lengthwise.models import Chunk, ModelStage
from lengthwise.offload import ActivationSaver
from lengthwise.program.step_program import Message, Place, Turn

UNWAITED_A_STAGE = 2  # grouped calls per stage whose sent tensors a rank keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline, seen from one of its ranks: its stage of the model, its place, and the cut of the layers."""

    stage: ModelStage
    mesh: Mesh
    cut: LayerCut


@dataclass(slots=True, kw_only=True)
class Messages:
    """Hidden states and their gradients between stages."""

    mesh: Mesh
    name: str
    _leaving: dict[tuple[Place, bool], Tensor] = field(default_factory=dict)
    _arriving: dict[tuple[Place, bool], tuple[Pending, Tensor]] = field(default_factory=dict)
    _sent: deque[Pending] = field(default_factory=deque)

    def give(self, place: Place, is_forward: bool, hidden: Tensor) -> None:
        """Keep the input of the pass at a place until it is sent there."""
        self._leaving[place, is_forward] = hidden

    def take(self, place: Place, is_forward: bool) -> Tensor:
        """Wait for the input of the pass at a place."""
        pending, hidden = self._arriving.pop((place, is_forward))
        pending.wait()
        return hidden

    def post(self, turn: Turn, room: Callable[[Message], Tensor]) -> None:
        """Post the messages of a turn in one grouped call. room: function that makes an empty tensor for a message."""
        self.mesh.world.phase = f"{self.name}, hidden states between stages at tick {turn.tick}"
        rank_of = self.mesh.rank_of_stage
        sends = [
            (self._leaving.pop((each.place, each.is_forward)).contiguous(), rank_of(each.stage)) for each in turn.sends
        ]
        rooms = [(room(each), each) for each in turn.receives]
        pending = self.mesh.between.exchange(sends, [(hidden, rank_of(each.stage)) for hidden, each in rooms])
        self._arriving |= {(each.place, each.is_forward): (pending, hidden) for hidden, each in rooms}
        self._sent.append(pending)
        self._wait(UNWAITED_A_STAGE * self.mesh.stages)

    def end(self) -> None:
        """Wait for all sends."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        while len(self._sent) > most:
            self._sent.popleft().wait()


def empty_hidden(model: nn.Module, chunk: Chunk, rows: int) -> Tensor:
    """Return an empty tensor for hidden states of a chunk, (1, rows, width)."""
    like = next(model.parameters())
    return torch.empty(1, rows, chunk.width, dtype=like.dtype, device=like.device)


@dataclass(slots=True, kw_only=True)
class KeptForward:
    """The part of a forward that its backward needs.

    rows: rows of the forward. end: the loss, or a number whose backward takes the gradient of the sent hidden states
    from `after`. before: list for the gradient of the received hidden states, None for an input of ids. router_logits:
    logits for the balance loss. router_share: this forward's part of that loss, once choices are counted.
    """

    rows: int
    end: Tensor
    after: list[Tensor]
    before: list[Tensor] | None
    router_logits: list[Tensor]
    saver: ActivationSaver | None
    router_share: Tensor | None = None


class _GraphStart(torch.autograd.Function):
    """Start of a graph at received hidden states, which it does not keep; their gradient goes into `gradients`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _begin: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.gradients.extend(gradients)
        return None, None, None


class _GraphEnd(torch.autograd.Function):
    """End of a graph at hidden states to send, which it does not keep; their gradient comes from `gradients`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.pop(), None


def received(hidden: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return hidden states as the start of a graph, whose backward appends their gradient to `gradients`."""
    begin = torch.empty(0, device=hidden.device, requires_grad=True)
    return _GraphStart.apply(hidden, begin, gradients)  # type: ignore[return-value]


def given_on(output: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return a number, (), whose backward takes the gradient of `output` from `gradients`."""
    return _GraphEnd.apply(output, gradients)  # type: ignore[return-value]
