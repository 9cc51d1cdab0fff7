"""One rank's spans of a microbatch, for layers without attention: rows of the same sequence, and their transfers.

Padding rows are a document of their own. A checkpointed layer keeps the states and halos that it received, which are
small, so that its recomputation sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lengthwise.attention.packs import rows_of, to_device
from lengthwise.attention.recompute import Recomputed
from lengthwise.comm import Transport
from lengthwise.program import MicrobatchProgram, RankRound, SequenceSpan, Transfer, spans_of, sweep_rounds_of

_PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSpans:
    """Spans of whole sequences that run together; entries are numbers of `LocalSpans.spans`.

    parents: places of the spans that they continue, in the last continued group before them, or (). are_continued:
    True if others continue them.
    """

    numbers: tuple[int, ...]
    parents: tuple[int, ...]
    are_continued: bool


class Join(NamedTuple):
    """Sequences (`targets`) that continue one (`sources`), as places in `CutPiece.low`. turned: the two swapped."""

    sources: slice
    targets: slice

    def turned(self) -> Join:
        """Return the join as backward passes need it."""
        return Join(self.targets, self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPiece:
    """A rank's spans of one cut piece: low ones and, except on the last position, high ones.

    low, high: numbers of `LocalSpans.spans`, one per sequence. joins: pairs of continued and continuing sequences, on
    position 0 only, where sequences begin and end.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    joins: tuple[Join, ...]


class LocalSpans:
    """A rank's spans of a microbatch, which a layer computes in one go. owner: attention whose layers run."""

    def __init__(self, program: MicrobatchProgram, transport: Transport, num_rows: int, owner: Recomputed) -> None:
        self.program, self.transport, self.num_rows, self._owner = program, transport, num_rows, owner
        spans = [*spans_of(program, transport.rank)]
        row = spans[-1].rows.stop if spans else 0
        if row < num_rows:
            spans.append(SequenceSpan(_PADDING, _PADDING, 0, 0, 0, num_rows - row, row))
        self.spans = tuple(spans)
        pieces = program.microbatch.pieces
        self.is_cut = [span.piece != _PADDING and pieces[span.piece].degree > 1 for span in spans]
        """Whether a span is in a piece that several ranks share, by span."""
        self.cut = tuple(number for number, is_cut in enumerate(self.is_cut) if is_cut)
        self._indices: dict[object, Tensor] = {}

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each span."""
        return [span.stop - span.start for span in self.spans]

    @cached_property
    def whole(self) -> tuple[WholeSpans, ...]:
        """Spans of whole sequences and of padding in two groups a level, after those that they continue."""
        parents = {number: self._parent(number) for number, is_cut in enumerate(self.is_cut) if not is_cut}
        levels, continued = dict[int, int](), {*parents.values()}
        found: dict[tuple[int, bool], list[int]] = {}
        for number, parent in parents.items():
            levels[number] = 0 if parent is None else levels[parent] + 1
            found.setdefault((levels[number], number in continued), []).append(number)
        places = {number: place for numbers in found.values() for place, number in enumerate(numbers)}
        return tuple(
            WholeSpans(
                numbers=tuple(numbers),
                parents=tuple(places[parent] for number in numbers if (parent := parents[number]) is not None),
                are_continued=are_continued,
            )
            for (_, are_continued), numbers in sorted(found.items())
        )

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Spans by number: the groups of whole ones, then the cut ones, if there are any."""
        return [*(group.numbers for group in self.whole), *([self.cut] if self.cut else [])]

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor] | None:
        """Rows in the order of groups, and the places there of all rows; None if the order is their own."""
        order = [number for group in self.groups for number in group]
        if order == sorted(order):
            return None
        rows = rows_of([self.spans[number].row for number in order], [self.lengths[number] for number in order])
        return rows, rows.argsort()

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [sum(self.lengths[number] for number in group) for group in self.groups]

    def grouped(self, x: Tensor) -> Sequence[Tensor]:
        """Return the rows of (1, rows, ...) by group."""
        rows = x if self._rows is None else x.index_select(1, self.index("rows", self._rows[0], x.device))
        return rows.split(self.sizes, dim=1) if len(self.sizes) > 1 else (rows,)

    def ungrouped(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows (1, rows, ...) of all groups in their own order."""
        rows = torch.cat([*parts], dim=1) if len(parts) > 1 else parts[0]
        return rows if self._rows is None else rows.index_select(1, self.index("places", self._rows[1], rows.device))

    def index(self, key: object, numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
        """Return numbers as a tensor on the device, made once a key."""
        if key not in self._indices:
            self._indices[key] = to_device(torch.as_tensor(numbers, dtype=torch.long, device="cpu"), device)
        return self._indices[key]

    @cached_property
    def cut_pieces(self) -> dict[int, CutPiece]:
        """Pieces that this rank shares with others, in plan order."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for number, span in enumerate(self.spans):
            if self.is_cut[number]:
                found.setdefault(span.piece, ([], []))[span.number != span.position].append(number)
        return {
            index: CutPiece(low=tuple(low), high=tuple(high), joins=tuple(self._joins(low)))
            for index, (low, high) in found.items()
        }

    def _joins(self, low: Sequence[int]) -> Iterator[Join]:
        """Yield joins in dependency order: a sequence's own before those of its continuations."""
        if not self.program.parents or self.spans[low[0]].position:
            return
        place_of, runs = {number: place for place, number in enumerate(low)}, [list[range]() for _ in low]
        for place, number in enumerate(low):
            parent = self._parent(number)
            if parent is not None:
                own = runs[place_of[parent]]
                first = own.pop().start if own and own[-1].stop == place else place
                own.append(range(first, place + 1))
        for place, own in enumerate(runs):
            yield from (Join(slice(place, place + 1), slice(run.start, run.stop)) for run in own)

    def _parent(self, number: int) -> int | None:
        """Return the first span of the sequence that a span's sequence continues, or None if it continues none."""
        span, parents = self.spans[number], self.program.parents
        parent = parents[span.sequence] if parents and span.piece != _PADDING else None
        return None if parent is None else self._first_of[parent]

    @cached_property
    def _first_of(self) -> dict[int, int]:
        return {span.sequence: number for number, span in reversed([*enumerate(self.spans)])}

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
        """Post one grouped call, if there are messages; return the received tensors."""
        arriving = [buffer(receive) for receive in each.receives]
        sends = [(message(send).contiguous(), send.target) for send in each.sends]
        receives = [(into, receive.source) for into, receive in zip(arriving, each.receives, strict=True)]
        if sends or receives:
            self.transport.exchange(sends, receives).wait()
        return arriving
