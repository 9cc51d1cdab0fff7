"""Short causal convolutions over this rank's tokens, each sequence from the first token of its text, on any rank.

The width - 1 tokens that the convolution reads before a span are put before it: tokens that this rank holds or
receives, of the sequence or of those that it continues, and zeros at a text's start. One plain convolution then runs
over all rows. Costs one round of a few rows per layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention.mixing import LocalSpans
from lengthwise.program import halo_moves, halo_round_of


class Halo:
    """The rows before a rank's spans for convolutions over `width` tokens, and the rows that other ranks need."""

    def __init__(self, spans: LocalSpans, width: int) -> None:
        program, rank = spans.program, spans.transport.rank
        self.round = halo_round_of(program, rank, width)
        self.back = self.round.turned()
        number_of = {span.key: number for number, span in enumerate(spans.spans)}
        self.sent: list[slice] = []
        """Local rows of the round's messages."""
        self.kept: dict[tuple[int, int, int], int] = {}
        """Rows (span, first, stop) that go before other spans of this rank, numbered after the arriving messages."""
        self.before: list[list[int]] = [[] for _ in spans.spans]
        """What is put before a span after zeros, by span: numbers of arriving messages and of kept rows."""
        self.zeros = [width - 1 for _ in spans.spans]
        arriving = itertools.count()
        for move in halo_moves(program, width, rank):
            source, target = number_of.get(move.source), number_of.get(move.target)
            if source is None:
                number = next(arriving)
            else:
                span = spans.spans[source]
                first, stop = move.start - span.start, move.stop - span.start
                if target is None:
                    self.sent.append(slice(span.row + first, span.row + stop))
                    continue
                number = self.kept.setdefault((source, first, stop), len(self.round.receives) + len(self.kept))
            assert target is not None, f"a move of other ranks: {move}"
            self.zeros[target] -= move.stop - move.start
            self.before[target].append(number)


class _Halos(torch.autograd.Function):
    """Rows (rows, channels) -> (the same rows, the arriving messages); backward sends their gradients back.

    The rows pass through, so that every rank takes part in backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spans: LocalSpans, halo: Halo) -> tuple[Tensor, ...]:
        sent = iter(halo.sent)
        arrived = spans.received(
            lambda: spans.exchange(
                halo.round, lambda _: rows[next(sent)], lambda t: rows.new_empty(t.tokens, rows.shape[1])
            )
        )
        ctx.spans, ctx.halo = spans, halo
        return rows.view_as(rows), *arrived

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_rows, *grads = grad_outputs
        leaving, halo = iter(grads), ctx.halo
        found = ctx.spans.exchange(
            halo.back, lambda _: next(leaving), lambda t: grad_rows.new_empty(t.tokens, grad_rows.shape[1])
        )
        total = grad_rows.clone() if found else grad_rows
        for rows, grad in zip(halo.sent, found, strict=True):
            total[rows] += grad
        return total, None, None


def convolve_spans(spans: LocalSpans, rows: Tensor, halo: Halo, convolve: Callable[[Tensor], Tensor]) -> Tensor:
    """Convolve (rows, channels) causally within each sequence. convolve: function for consecutive rows."""
    arrived: tuple[Tensor, ...] = ()
    if halo.round.sends or halo.round.receives:
        rows, *arrived = _Halos.apply(rows, spans, halo)  # pyright: ignore[reportAssignmentType, reportGeneralTypeIssues]
    owns, parts, sizes = rows.split(spans.lengths), list[Tensor](), list[int]()
    # Of a span, not of `rows`: backward of a slice writes as many rows as it was cut from.
    others = [*arrived, *(owns[span][first:stop] for span, first, stop in halo.kept)]
    for number, own in enumerate(owns):
        before = [others[each] for each in halo.before[number]]
        parts += [rows.new_zeros(halo.zeros[number], rows.shape[1]), *before, own]
        sizes += [halo.zeros[number] + sum(len(each) for each in before), len(own)]
    return torch.cat(convolve(torch.cat(parts)).split(sizes)[1::2])
