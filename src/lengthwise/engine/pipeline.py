"""What a rank that is a stage of a pipeline has beside its passes: its neighbours' messages, and calls of dropout.

Hidden states go on to the next chunk, gradients back to the one before. Messages of a turn are one grouped call; a pass
waits for its message, which was posted turns ago, and from time to time this rank does for what it sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lengthwise.attention import BlockKernel, PlannedAttention
from lengthwise.comm import Mesh, Pending, SoloTransport
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import LayerCut
from lengthwise.models import Chunk, KeyedDropout, ModelStage, run_chunk
from lengthwise.program import lower_plan
from lengthwise.program.step_program import Message, Place, Turn

UNWAITED_A_STAGE = 2  # grouped calls, of which a rank keeps what it sent
_ONE_TOKEN = Plan(
    ranks=1,
    layers=1,
    capacity=1,
    tokens=(1,),
    microbatches=(Microbatch(pieces=(Piece(ranks=(0,), sequences=(0,)),)),),
    requires=(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Of which a rank is a stage: its part of the model, and its place."""

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
        """Keep what the pass at a place needs until it is sent there."""
        self._leaving[place, is_forward] = hidden

    def take(self, place: Place, is_forward: bool) -> Tensor:
        """Wait for what the pass at a place needs."""
        pending, hidden = self._arriving.pop((place, is_forward))
        pending.wait()
        return hidden

    def post(self, turn: Turn, room: Callable[[Message], Tensor]) -> None:
        """Post the messages of a turn in one grouped call; room: makes what one is received in."""
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
        """Wait for all that was sent."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        while len(self._sent) > most:
            self._sent.popleft().wait()


def count_dropout_calls(
    model: nn.Module, mesh: Mesh, chunks: Mapping[int, Chunk], kernel: BlockKernel, device: torch.device
) -> None:
    """Count the calls of dropout before each chunk, by one row through each, the first time. Collective."""
    if all(model.training in each.dropout_calls for each in chunks.values()):
        return
    (program,) = lower_plan(_ONE_TOKEN, 0)
    calls = torch.zeros(len(chunks) * mesh.stages, dtype=torch.int64, device=device)
    for chunk in chunks.values():
        planned = PlannedAttention(program, SoloTransport(), kernel, layers_passed=chunk.layers_passed)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        counting = KeyedDropout(torch.zeros(planned.num_rows, dtype=torch.int64, device=device))
        hidden = None if chunk.is_first else empty_hidden(model, chunk, planned.num_rows).zero_()
        with torch.no_grad(), chunk.running(hidden), counting:
            run_chunk(model, planned, row, row)
        calls[chunk.number] = counting.calls
    mesh.world.all_reduce(calls)
    before = ((calls.cumsum(0) - calls) // mesh.num_replicas).tolist()
    for chunk in chunks.values():
        chunk.dropout_calls[model.training] = before[chunk.number]


def empty_hidden(model: nn.Module, chunk: Chunk, rows: int) -> Tensor:
    """Return room for the hidden states that a chunk takes or gives on, (1, rows, width)."""
    like = next(model.parameters())
    return torch.empty(1, rows, chunk.width, dtype=like.dtype, device=like.device)
