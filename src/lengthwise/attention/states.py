"""Layers with a state that runs through a sequence (gated delta rule, KDA, Mamba 2), and through what it continues.

Whole sequences run from the states after those that they continue, or from zero. A span of a cut sequence runs from
zero, and gives its map S -> A S + B. A sweep between neighbours (`program.spans`) brings the state before it, whose
contribution is added to the outputs. With L_j, H_j the maps of position j's low and high span, N_(d-1) the last one's:

    up     S_(j+1) = L_j(S_j)                  the state before the low span
    down   N_j = H_j . N_(j+1) . L_j           N_(j+1)(L_j(S_j)) is the state before the high one

S_0 is zero, or N_0(S_0) of the continued sequence. Backward exchanges low and high and transposes maps. States are fp32
(fp64 under fp64), maps multiply in fp64 (docs/decisions/states-by-sweep.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lengthwise.attention.mixing import Join, LocalSpans
from lengthwise.attention.partials import wide
from lengthwise.program import Content, Transfer


class Map(NamedTuple):
    """S -> a S + b of some sequences. a: matrix on the left of S (is_matrix), or a factor of all its entries."""

    a: Tensor
    b: Tensor
    is_matrix: bool

    def __call__(self, state: Tensor) -> Tensor:
        """Return the state after the span."""
        return (_product(self.a, state) if self.is_matrix else self.a * state) + self.b

    def of(self, sequences: slice) -> Map:
        """Return the map of some of its sequences."""
        return Map(self.a[sequences], self.b[sequences], self.is_matrix)

    def after(self, other: Map) -> Map:
        """Return the map of `other` and then this one."""
        a = _product(self.a, other.a) if self.is_matrix else self.a * other.a
        return Map(a, self(other.b), self.is_matrix)

    def flat(self) -> Tensor:
        """Return the map as one message."""
        return torch.cat([self.a.reshape(-1), self.b.reshape(-1)])

    def from_flat(self, flat: Tensor) -> Map:
        """Return the map of a message, with this map's shapes."""
        a, b = flat.split([self.a.numel(), self.b.numel()])
        return Map(a.view(self.a.shape), b.view(self.b.shape), self.is_matrix)

    def transposed(self, b: Tensor) -> Map:
        """Return the map of gradients in backward. b: gradient added on the way."""
        return Map(self.a.mT if self.is_matrix else self.a, b, self.is_matrix)

    def grad_of_a(self, grad: Tensor, state: Tensor) -> Tensor:
        """Return the gradient of `a`, from the gradient of a S + b."""
        return _product(grad, state.mT) if self.is_matrix else (grad * state).sum_to_size(self.a.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in fp64, because the rounding of fp32 products is a setting of the whole process."""
    return (a.double() @ b.double()).to(b.dtype)


class Opened(NamedTuple):
    """Results of a scan over spans from a state of zero: `out` and `reader` (1, rows, ...), and the spans' maps.

    a, b: (spans, heads, ...). A span without tokens has the identity map.
    """

    out: Tensor
    reader: Tensor
    a: Tensor
    b: Tensor


class Scan(Protocol):
    """One layer's scan over tokens. lengths: tokens of the spans, side by side in `tokens`."""

    is_matrix: bool

    def run(
        self, tokens: Mapping[str, Tensor], lengths: Sequence[int], *, before: Tensor | None, states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs (1, rows, ...) of whole sequences and, if asked for, the states after them.

        before: states before them, (sequences, heads, ...) like those after them; zeros by default.
        """
        ...

    def open(self, tokens: Mapping[str, Tensor], lengths: Sequence[int]) -> Opened:
        """Run spans from a state of zero."""
        ...

    def read(self, reader: Tensor, state: Tensor) -> Tensor:
        """Return the contribution of a state before a span, (1, heads, ...), to its outputs."""
        ...


class _PieceInSweep:
    """One piece in a sweep: the state before its first span in reading order, and the map between its two spans.

    joins: joins of `CutPiece`, in reading order.
    """

    def __init__(self, maps: Sequence[Map], joins: Sequence[Join]) -> None:
        self.first, self.second = maps[0], maps[1] if len(maps) > 1 else None
        self.between, self._joins = self.first, joins

    @cached_property
    def before(self) -> Tensor:
        """The states before its first span. On position 0 they follow from the maps, which must have arrived."""
        states = torch.zeros_like(self.first.b)
        for sources, targets in self._joins:
            after = self.first.of(sources)(states[sources])
            if self.second is not None:
                after = self.second.of(sources)(self.between.of(sources)(after))
            states[targets] += after.sum(0)
        return states

    def message(self, content: Content) -> Tensor:
        if content == Content.STATE:
            return self.first(self.before)
        return (self.between if self.second is None else self.second.after(self.between.after(self.first))).flat()

    def buffer(self, content: Content) -> Tensor:
        return torch.empty_like(self.first.b if content == Content.STATE else self.first.flat())

    def take(self, content: Content, message: Tensor) -> None:
        if content == Content.STATE:
            self.before = message
        else:
            self.between = self.first.from_flat(message)

    def states(self) -> list[Tensor]:
        """Return the states before its spans."""
        return [self.before] if self.second is None else [self.before, self.between(self.first(self.before))]


def sweep(
    spans: LocalSpans, maps: Mapping[int, Sequence[Map]], joins: Mapping[int, Sequence[Join]]
) -> list[list[Tensor]]:
    """Return the states before each piece's spans. maps, joins: those of its spans and sequences, in reading order."""
    places = {piece: _PieceInSweep(each, joins[piece]) for piece, each in maps.items()}

    def message(t: Transfer) -> Tensor:
        return places[t.piece].message(t.content)

    for each in spans.sweep:
        arrived = spans.exchange(each, message, lambda t: places[t.piece].buffer(t.content))
        for t, arrival in zip(each.receives, arrived, strict=True):
            places[t.piece].take(t.content, arrival)
    return [place.states() for place in places.values()]


class _States(torch.autograd.Function):
    """(rows, a and b of the maps of all cut pieces) -> (the same rows, the states before their spans).

    The rows only pass through, so that every rank takes part in backward, even if its spans are empty and no output
    reads a state.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spans: LocalSpans, is_matrix: bool, *flat: Tensor) -> tuple[Tensor, ...]:
        given = (Map(a, b, is_matrix) for a, b in zip(flat[::2], flat[1::2], strict=True))
        maps, joins = _by_piece(spans, given), {piece: each.joins for piece, each in spans.cut_pieces.items()}
        states = spans.received(lambda: [state for each in sweep(spans, maps, joins) for state in each])
        ctx.save_for_backward(*flat[::2], *states)
        ctx.spans, ctx.is_matrix = spans, is_matrix
        return rows.view_as(rows), *states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_rows, *grads = grad_outputs
        saved = ctx.saved_tensors  # read once: a checkpointed layer gives each of them once
        factors, states = saved[: len(grads)], saved[len(grads) :]
        maps = [Map(a, grad, ctx.is_matrix) for a, grad in zip(factors, grads, strict=True)]
        back = _by_piece(ctx.spans, (each.transposed(each.b) for each in maps))
        pieces = ctx.spans.cut_pieces.items()
        joins = {piece: [join.turned() for join in reversed(each.joins)] for piece, each in pieces}
        found = sweep(ctx.spans, {piece: each[::-1] for piece, each in back.items()}, joins)
        after = [grad for each in found for grad in reversed(each)]
        gradients = [
            each
            for of_map, grad, state in zip(maps, after, states, strict=True)
            for each in (of_map.grad_of_a(grad, state), grad)
        ]
        return grad_rows, None, None, *gradients


def _by_piece(spans: LocalSpans, maps: Iterator[Map]) -> dict[int, list[Map]]:
    pieces = spans.cut_pieces.items()
    return {index: [next(maps) for _ in filter(None, (piece.low, piece.high))] for index, piece in pieces}


def scan_spans(spans: LocalSpans, tokens: Mapping[str, Tensor], scan: Scan) -> Tensor:
    """Run a scan over this rank's tokens, each sequence from the first token of its text, on any rank.

    tokens: inputs of the scan, (1, rows, ...). Returns (1, rows, ...).
    """
    lengths, parts = spans.lengths, {name: spans.grouped(x) for name, x in tokens.items()}
    outs, ends = list[Tensor](), None
    for number, group in enumerate(spans.whole):
        of_group = {name: each[number] for name, each in parts.items()}
        before = None if ends is None or not group.parents else ends[spans.index(number, group.parents, ends.device)]
        sizes = [lengths[each] for each in group.numbers]
        out, states = scan.run(of_group, sizes, before=before, states=group.are_continued)
        outs.append(out)
        if states is not None:
            ends = states.to(wide(states.dtype))  # in which gradients of all that continue add up
    if not spans.cut:
        return spans.ungrouped(outs)
    cut_lengths = [lengths[number] for number in spans.cut]
    opened = scan.open({name: each[-1] for name, each in parts.items()}, cut_lengths)
    readers = dict(zip(spans.cut, opened.reader.split(cut_lengths, dim=1), strict=True))
    slots = [each for piece in spans.cut_pieces.values() for each in (piece.low, piece.high) if each]
    place = {number: where for where, number in enumerate(spans.cut)}
    by_span = opened.a.split(1), opened.b.split(1)
    maps = [torch.cat([x[place[number]] for number in slot]) for slot in slots for x in by_span]
    with torch.autocast(opened.out.device.type, enabled=False):
        rows, *states = _States.apply(torch.cat([*outs, opened.out], dim=1), spans, scan.is_matrix, *maps)
        added = {
            number: scan.read(readers[number].to(before.dtype), before)
            for slot, state in zip(slots, states, strict=True)
            for number, before in zip(slot, state.split(1), strict=True)
        }
        *whole, cut = rows.split(spans.sizes, dim=1)
        cut = cut + torch.cat([added[number] for number in spans.cut], dim=1)
        return spans.ungrouped([*whole, cut.to(rows.dtype)])
