"""Short causal convolutions over this rank's tokens, each sequence from the first token of its text, on any rank.

The width - 1 tokens that the convolution reads before a span are put before it: tokens that this rank holds or
receives, of the sequence or of those that it continues, and zeros at a text's start. One plain convolution then runs
over all rows. Costs one round of a few rows per layer, and as many operations for 500 documents as for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention.mixing import LocalSpans
from lengthwise.attention.packs import to_device
from lengthwise.program import halo_moves, halo_round_of


class Halo:
    """The rows before a rank's spans for convolutions over `width` tokens, and the rows that other ranks need."""

    def __init__(self, spans: LocalSpans, width: int) -> None:
        program, rank, num_rows = spans.program, spans.transport.rank, spans.num_rows
        self.round = halo_round_of(program, rank, width)
        self.back = self.round.turned()
        number_of = {span.key: number for number, span in enumerate(spans.spans)}
        self.sent: list[slice] = []
        """Local rows of the round's messages."""
        # What is put before a span: local rows, and after them arriving ones.
        before = [list[int]() for _ in spans.spans]
        arriving = itertools.count(num_rows)
        for move in halo_moves(program, width, rank):
            source, target = number_of.get(move.source), number_of.get(move.target)
            if source is None:
                assert target is not None, f"a move of other ranks: {move}"
                before[target] += itertools.islice(arriving, move.stop - move.start)
                continue
            span = spans.spans[source]
            rows = range(span.row + move.start - span.start, span.row + move.stop - span.start)
            if target is None:
                self.sent.append(slice(rows.start, rows.stop))
            else:
                before[target] += rows
        self.num_rows = num_rows + len(before) * (width - 1)
        lengths = torch.tensor(spans.lengths, device="cpu")
        shifts = torch.arange(width - 1, self.num_rows - num_rows + 1, width - 1, device="cpu")
        self._own = torch.arange(num_rows, device="cpu") + shifts.repeat_interleave(lengths)
        moved = [
            (row, span.row + (number + 1) * (width - 1) - len(rows) + place)
            for number, (span, rows) in enumerate(zip(spans.spans, before, strict=True))
            for place, row in enumerate(rows)
        ]
        kept = [each for each in moved if each[0] < num_rows]
        self._kept = torch.tensor(kept, dtype=torch.long, device="cpu").view(-1, 2)
        arrived = [place for _, place in sorted(moved)[len(kept) :]]
        self._arrived = torch.tensor(arrived, dtype=torch.long, device="cpu")
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return places among the rows and what is before them: (own rows, kept rows, their places, arriving rows).

        Kept rows are those of this rank that go before other spans of it.
        """
        if device not in self._on:
            host = (self._own, *self._kept.unbind(1), self._arrived)
            self._on[device] = to_device(torch.cat(host), device).split([len(each) for each in host])
        return self._on[device]


class _Padded(torch.autograd.Function):
    """Rows (rows, channels) -> the same with what is before each span; backward sends gradients of messages back.

    All rows pass, so that every rank takes part in backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spans: LocalSpans, halo: Halo) -> Tensor:
        own, kept, before, arriving = halo.places(rows.device)
        padded = rows.new_zeros(halo.num_rows, rows.shape[1]).index_copy_(0, own, rows)
        if len(kept):
            padded.index_copy_(0, before, rows.index_select(0, kept))
        sent = iter(halo.sent)
        arrived = spans.received(
            lambda: spans.exchange(
                halo.round, lambda _: rows[next(sent)], lambda t: rows.new_empty(t.tokens, rows.shape[1])
            )
        )
        if arrived:
            padded.index_copy_(0, arriving, torch.cat(arrived))
        ctx.spans, ctx.halo = spans, halo
        return padded

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), halo = grad_outputs, ctx.halo
        own, kept, before, arriving = halo.places(grad.device)
        total = grad.index_select(0, own)
        if len(kept):  # in one order, also on GPUs, if several sequences continue one
            total.index_put_((kept,), grad.index_select(0, before), accumulate=True)
        sizes = [each.tokens for each in halo.round.receives]
        leaving = iter(grad.index_select(0, arriving).split(sizes) if sizes else ())
        found = ctx.spans.exchange(
            halo.back, lambda _: next(leaving), lambda t: grad.new_empty(t.tokens, grad.shape[1])
        )
        for rows, each in zip(halo.sent, found, strict=True):
            total[rows] += each
        return total, None, None


def convolve_spans(spans: LocalSpans, rows: Tensor, halo: Halo, convolve: Callable[[Tensor], Tensor]) -> Tensor:
    """Convolve (rows, channels) causally within each sequence. convolve: function for consecutive rows."""
    own, *_ = halo.places(rows.device)
    return convolve(_Padded.apply(rows, spans, halo)).index_select(0, own)  # type: ignore[no-any-return]
