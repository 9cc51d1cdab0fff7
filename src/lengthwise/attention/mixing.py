"""One rank's spans of a microbatch, for layers without attention: rows of the same sequence, and their transfers.

Padding rows are a document of their own. A checkpointed layer keeps the states and halos that it received, which are
small, so that its recomputation sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lengthwise.attention.recompute import Recomputed
from lengthwise.comm import Transport
from lengthwise.program import MicrobatchProgram, RankRound, SequenceSpan, Transfer, spans_of, sweep_rounds_of

_PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPiece:
    """A rank's spans of one cut piece: low ones and, except on the last position, high ones.

    Entries are numbers of `LocalSpans.spans`, one per sequence.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]


class LocalSpans:
    """A rank's spans of a microbatch, which a layer computes in one go. owner: the attention whose layers run."""

    def __init__(self, program: MicrobatchProgram, transport: Transport, num_rows: int, owner: Recomputed) -> None:
        self.program, self.transport, self._owner = program, transport, owner
        spans = [*spans_of(program, transport.rank)]
        row = spans[-1].rows.stop if spans else 0
        if row < num_rows:
            spans.append(SequenceSpan(_PADDING, _PADDING, 0, 0, 0, num_rows - row, row))
        self.spans = tuple(spans)
        pieces = program.microbatch.pieces
        self.is_cut = [span.piece != _PADDING and pieces[span.piece].degree > 1 for span in spans]
        """Whether a span is in a piece that several ranks share, by span."""

    @property
    def lengths(self) -> list[int]:
        """Rows of each span."""
        return [span.stop - span.start for span in self.spans]

    @cached_property
    def cut_pieces(self) -> dict[int, CutPiece]:
        """Pieces that this rank shares with others, in plan order."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for number, span in enumerate(self.spans):
            if self.is_cut[number]:
                found.setdefault(span.piece, ([], []))[span.number != span.position].append(number)
        return {index: CutPiece(low=tuple(low), high=tuple(high)) for index, (low, high) in found.items()}

    @cached_property
    def sweep(self) -> tuple[RankRound, ...]:
        """Rounds of this rank in a sweep."""
        return sweep_rounds_of(self.program, self.transport.rank)

    def received(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the tensors that `run` receives, or received in the layer's first run."""
        layer = self._owner.recomputation
        return run() if layer is None else layer.receive(run)

    def exchange(
        self, each: RankRound, message: Callable[[Transfer], Tensor], buffer: Callable[[Transfer], Tensor]
    ) -> list[Tensor]:
        """Post one grouped call, if there is something to send or receive; return the received tensors."""
        arriving = [buffer(receive) for receive in each.receives]
        sends = [(message(send).contiguous(), send.target) for send in each.sends]
        receives = [(into, receive.source) for into, receive in zip(arriving, each.receives, strict=True)]
        if sends or receives:
            self.transport.exchange(sends, receives).wait()
        return arriving
