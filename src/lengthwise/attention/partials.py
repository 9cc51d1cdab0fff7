"""Partial results of attention, which grow block by block: for one range of heads, all rows of a rank.

Sums are in fp32 (fp64 under fp64) and cast once. The diagonal block of a query (and without a window of a key) comes
first, so that nothing is read before it is written. Rows after the tokens are padding, and 0.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from lengthwise.attention.kernels import Block, Gradients, Saved, merge_block
from lengthwise.attention.packs import Pack
from lengthwise.attention.ring_steps import RingPass
from lengthwise.program import HeadRange

Attended: TypeAlias = dict[HeadRange, tuple[Block, Saved]]
"""Queries, keys and values, and their results, by the range of heads that a rank attends."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are merged and summed: fp32, or fp64 under fp64."""
    return torch.promote_types(dtype, torch.float32)


class PartialOut:
    """Output and log-sum-exp of the first `tokens` queries of `block`, for the range `heads` of a ring pass."""

    def __init__(self, block: Block, heads: HeadRange, ring: RingPass, *, tokens: int) -> None:
        q = block.q
        self._dtype, widest, rows = q.dtype, wide(q.dtype), q.shape[0]
        self._sums_in = widest if heads in ring.merged else q.dtype
        self._is_one_pack = len(ring.steps[0].packs.get(heads, ())) == 1
        if self._is_one_pack:  # it has all rows, and its results bring the memory
            return
        self._out = q.new_empty(q.shape, dtype=self._sums_in)
        self._lse = q.new_empty(q.shape[1], rows, dtype=widest)
        if tokens < rows:
            self._out[tokens:].zero_()
            self._lse[:, tokens:].zero_()

    def take_pack(self, pack: Pack, out: Tensor, lse: Tensor) -> None:
        """Take the result of a pack."""
        if self._is_one_pack:
            self._out, self._lse = out.to(self._sums_in), lse
        else:
            self._out[pack.rows], self._lse[:, pack.rows] = out, lse

    def take(self, rows: slice | Tensor, out: Tensor, lse: Tensor, *, is_first: bool = False) -> None:
        """Take the result of a block. rows: its queries. is_first: True if it is the first of its queries."""
        if is_first:
            self._out[rows], self._lse[:, rows] = out, lse
        elif isinstance(rows, slice):
            merge_block(self._out[rows], self._lse[:, rows], out, lse)
        else:
            own_out, own_lse = picked(self._out, rows), picked(self._lse, rows, dim=1)
            merge_block(own_out, own_lse, out, lse)
            self._out.index_copy_(0, rows, own_out)
            self._lse.index_copy_(1, rows, own_lse)

    def done(self, sinks: Tensor | None) -> Saved:
        """Return output, in the dtype of the queries, and log-sum-exp, with `sinks` (heads,) merged in."""
        out, lse = self._out, self._lse
        if sinks is not None:  # exact afterwards, for backward too: docs/decisions/attention-sinks.md
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * torch.exp(lse - with_sink).t()[..., None], with_sink
        return Saved(out=out.to(self._dtype), lse=lse)


class PartialGradients:
    """Gradients of the first `tokens` queries of `block`, and of its keys and values: sums, unless `is_of_packs`."""

    def __init__(self, block: Block, heads: HeadRange, ring: RingPass, *, windowed: bool, tokens: int) -> None:
        self._block, self._first_writes = block, not windowed
        self.is_of_packs = heads in ring.steps[0].packs and heads not in ring.summed
        self._found: tuple[Tensor, ...] = ()
        if self.is_of_packs:
            return
        make = torch.zeros if windowed else torch.empty
        self.dq = torch.empty_like(block.q, dtype=wide(block.q.dtype))
        self.dkv = make(2, *block.k.shape, dtype=self.dq.dtype, device=block.k.device)
        self._found = (self.dq, *self.dkv)
        if tokens < block.q.shape[0]:
            self.dq[tokens:].zero_()
            self.dkv[:, tokens:].zero_()

    def take_pack(self, pack: Pack, grads: Gradients) -> None:
        """Take the gradients of a pack."""
        if not self._found:
            block = self._block
            if grads[0].shape[0] == block.q.shape[0]:
                self._found = grads
                return
            self._found = tuple(x.new_empty(x.shape) for x in (block.q, block.k, block.v))
        for total, part in zip(self._found, grads, strict=True):
            total[pack.rows] = part

    def take(
        self, rows: slice | Tensor, cols: slice | Tensor, grads: Gradients, into: Tensor, *, is_first: bool = False
    ) -> None:
        """Add the gradients of a block. rows, cols: its queries and keys, once each.

        into: sums (2, tokens, kv_heads, head_dim) of the shard of its keys. is_first: True if it is the first of its
        queries.
        """
        dq, *dkv = grads
        if is_first:
            self.dq[rows] = dq
        else:
            _add(self.dq, rows, dq)
        for total, part in zip(into, dkv, strict=True):
            if is_first and self._first_writes:
                total[cols] = part
            else:
                _add(total, cols, part)

    def done(self, *, widely: bool) -> Gradients:
        """Return (dq, dk, dv) in the dtypes of q, k and v, or in those of sums if `widely`."""
        block = self._block
        dtypes = (block.q.dtype, block.k.dtype, block.v.dtype)
        dq, dk, dv = map(Tensor.to, self._found, map(wide, dtypes) if widely else dtypes)
        return dq, dk, dv


def picked(x: Tensor, rows: slice | Tensor, dim: int = 0) -> Tensor:
    """Return these rows: a view of a slice, else a copy."""
    if isinstance(rows, slice):
        return x.narrow(dim, rows.start, rows.stop - rows.start)
    return x.index_select(dim, rows)


def _add(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))
