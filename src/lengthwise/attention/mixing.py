"""One rank's spans of a microbatch, for layers without attention: rows of the same sequence, and their transfers.

Padding rows are a document of their own. A checkpointed layer keeps the states and halos that it received, which are
small, so that its recomputation sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from lengthwise.attention.recompute import Recomputed
from lengthwise.comm import Transport
from lengthwise.program import MicrobatchProgram, RankRound, SequenceSpan, Transfer, spans_of, sweep_rounds_of

_PADDING = -1


class Join(NamedTuple):
    """Sequences that begin where others end, as places in `SweptPiece.low`; several sources only read backward."""

    sources: slice
    targets: slice

    def turned(self) -> Join:
        """Return the same read backward."""
        return Join(self.targets, self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptPiece:
    """A rank's spans of a piece for which states arrive: low ones and, except on the last position, high ones.

    low, high: numbers of `LocalSpans.spans`, one per sequence. joins: what continues what, on position 0, where
    sequences begin and end.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    joins: tuple[Join, ...]


class LocalSpans:
    """A rank's spans of a microbatch, which a layer computes in one go. owner: the attention whose layers run."""

    def __init__(self, program: MicrobatchProgram, transport: Transport, num_rows: int, owner: Recomputed) -> None:
        self.program, self.transport, self._owner = program, transport, owner
        spans = [*spans_of(program, transport.rank)]
        row = spans[-1].rows.stop if spans else 0
        if row < num_rows:
            spans.append(SequenceSpan(_PADDING, _PADDING, 0, 0, 0, num_rows - row, row))
        self.spans = tuple(spans)
        pieces, parents = program.microbatch.pieces, program.parents
        joined = {each for pair in enumerate(parents) if pair[1] is not None for each in pair}
        self.is_swept = [
            span.piece != _PADDING and (pieces[span.piece].degree > 1 or span.sequence in joined) for span in spans
        ]
        """Whether a state before or after a span counts, by span: the sequence is cut, continues one or is continued."""

    @property
    def lengths(self) -> list[int]:
        """Rows of each span."""
        return [span.stop - span.start for span in self.spans]

    @cached_property
    def swept_pieces(self) -> dict[int, SweptPiece]:
        """Pieces with spans that are swept, in plan order."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for number, span in enumerate(self.spans):
            if self.is_swept[number]:
                found.setdefault(span.piece, ([], []))[span.number != span.position].append(number)
        return {
            index: SweptPiece(low=tuple(low), high=tuple(high), joins=tuple(self._joins(low)))
            for index, (low, high) in found.items()
        }

    def _joins(self, low: Sequence[int]) -> Iterator[Join]:
        """Yield the joins of sequences, of which none comes before the join of which its source is a target."""
        if not self.program.parents or self.spans[low[0]].position:
            return
        place_of = {self.spans[number].sequence: place for place, number in enumerate(low)}
        found: dict[int, list[range]] = {place: [] for place in place_of.values()}
        for sequence, place in place_of.items():
            parent = self.program.parents[sequence]
            if parent is not None:
                runs = found[place_of[parent]]
                first = runs.pop().start if runs and runs[-1].stop == place else place
                runs.append(range(first, place + 1))
        for place, runs in found.items():
            yield from (Join(slice(place, place + 1), slice(run.start, run.stop)) for run in runs)

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
