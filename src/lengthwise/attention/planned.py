"""Attention as a lowered microbatch prescribes it: packed documents apart, cut ones over their rings.

One autograd function does a layer of a microbatch on one rank. Keys and values travel as one contiguous tensor
(2, tokens, kv_heads, head_dim), posted before the block they hide behind. Partial results merge in fp32 (fp64 under
fp64) and are cast once. In the backward pass keys and values go round again while their gradients, in the
accumulation dtype, follow one hop behind and end at home. Method: ring attention (Liu et al. 2023) with the
symmetric cut of both ends; the rounds come from `program.lower`, so no rank decides anything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention.kernels import BlockKernel
from lengthwise.attention.merge import merge_block
from lengthwise.comm import Pending, Transport
from lengthwise.program import BlockTask, MicrobatchProgram, Round, Transfer


class PlannedAttention:
    """One rank's part in the attention of one microbatch; the same object serves all layers, and both passes."""

    def __init__(self, program: MicrobatchProgram, transport: Transport, kernel: BlockKernel) -> None:
        self._program, self._transport, self._kernel = program, transport, kernel
        rank = transport.rank
        self.num_tokens = sum(segment.num_tokens for segment in program.segments(rank))
        self.longest_tokens = max(program.tokens[i] for piece in program.microbatch.pieces for i in piece.sequences)
        self.layers_run = 0
        self._tasks = [program.tasks(rank, hop) for hop in range(program.hops)]
        self._rings = {
            index: (start, start + program.shard_tokens(index, position), position, piece.degree)
            for (index, piece, position), start in zip(
                program.pieces_of(rank), program.shard_starts(rank).values(), strict=True
            )
            if piece.degree > 1
        }
        self._forward = [self._mine(each) for each in program.forward_rounds] if self._rings else []
        self._backward = [self._mine(each) for each in program.backward_rounds] if self._rings else []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out (tokens, heads, head_dim) in q's dtype, lse (heads, tokens) in the accumulation dtype)."""
        wide = _wide(q.dtype)
        out = torch.zeros_like(q, dtype=wide if self._rings else q.dtype)
        lse = torch.zeros(q.shape[1], q.shape[0], dtype=wide, device=q.device)
        held = self._pack(k, v)
        for hop in range(self._hops):
            pending, arriving = self._pass_keys(hop, held)
            for task in self._tasks[hop]:
                keys, values = self._keys_of(task, k, v, held)
                rows = slice(task.q_start, task.q_stop)
                block_out, block_lse = self._kernel.forward(q[rows], keys, values, causal=task.causal, scale=scale)
                if hop == 0:  # the diagonal block comes first and covers every query
                    out[rows], lse[:, rows] = block_out, block_lse
                else:
                    merge_block(out[rows], lse[:, rows], block_out, block_lse)
            pending.wait()
            held = arriving
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's tokens, in the dtype of q, k and v."""
        wide = _wide(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        dkv = torch.zeros(2, *k.shape, dtype=wide, device=k.device)
        held, sent_on = self._pack(k, v), dict[int, Tensor]()
        for hop in range(self._hops + bool(self._rings)):
            pending, arriving, gradients = self._pass_keys_and_gradients(hop, held, sent_on, wide)
            fresh = {piece: torch.zeros_like(keys, dtype=wide) for piece, keys in held.items()}
            for task in self._tasks[hop] if hop < self._hops else ():
                keys, values = self._keys_of(task, k, v, held)
                rows, cols = slice(task.q_start, task.q_stop), slice(task.kv_start, task.kv_stop)
                block = (grad_out[rows], q[rows], keys, values, out[rows], lse[:, rows])
                block_dq, block_dk, block_dv = self._kernel.backward(*block, causal=task.causal, scale=scale)
                dq[rows] += block_dq
                into, cols = (fresh[task.piece], cols) if task.piece in held else (dkv, rows)
                into[0, cols] += block_dk
                into[1, cols] += block_dv
            pending.wait()
            for piece, so_far in gradients.items():
                start, stop, _, degree = self._rings[piece]
                (dkv[:, start:stop] if hop == degree else fresh[piece]).add_(so_far)
            held, sent_on = arriving, fresh
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)

    @property
    def _hops(self) -> int:
        """Hops this rank takes part in, not those of a longer ring beside it."""
        return max((degree for *_, degree in self._rings.values()), default=1)

    def _mine(self, each: Round) -> tuple[Sequence[Transfer], Sequence[Transfer]]:
        rank = self._transport.rank
        sends = tuple(transfer for transfer in each.transfers if transfer.source == rank)
        return sends, tuple(transfer for transfer in each.transfers if transfer.target == rank)

    def _pack(self, k: Tensor, v: Tensor) -> dict[int, Tensor]:
        """Copy keys and values of each ring shard into the tensor that will travel."""
        return {piece: torch.stack((k[a:b], v[a:b])) for piece, (a, b, *_) in self._rings.items()}

    def _keys_of(self, task: BlockTask, k: Tensor, v: Tensor, held: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        if task.piece in held:
            keys, values = held[task.piece][:, task.kv_start : task.kv_stop]
            return keys, values
        # A document that is not cut: its keys are the rank's own, where its queries are.
        return k[task.q_start : task.q_stop], v[task.q_start : task.q_stop]

    def _pass_keys(self, hop: int, held: dict[int, Tensor]) -> tuple[Pending, dict[int, Tensor]]:
        """Post round `hop` of the forward pass; return what will be held after it."""
        if hop >= self._hops - 1:
            return _Nothing(), {}
        arriving = self._room(hop + 1, held, last_hop=-1)
        return self._post(self._forward[hop], {"kv": held}, {"kv": arriving}), arriving

    def _pass_keys_and_gradients(
        self, hop: int, held: dict[int, Tensor], sent_on: dict[int, Tensor], wide: torch.dtype
    ) -> tuple[Pending, dict[int, Tensor], dict[int, Tensor]]:
        """Post round `hop` of the backward pass; return what will be held next, and gradients of what is held now."""
        if not self._rings:
            return _Nothing(), {}, {}
        arriving = self._room(hop + 1, held, last_hop=-1)
        gradients = self._room(hop, sent_on, last_hop=0, dtype=wide) if hop else {}
        out_of, into = {"kv": held, "dkv": sent_on}, {"kv": arriving, "dkv": gradients}
        return self._post(self._backward[hop], out_of, into), arriving, gradients

    def _post(
        self,
        mine: tuple[Sequence[Transfer], Sequence[Transfer]],
        out_of: dict[str, dict[int, Tensor]],
        into: dict[str, dict[int, Tensor]],
    ) -> Pending:
        sends, receives = mine
        return self._transport.exchange(
            [(out_of[each.content][each.piece], each.target) for each in sends],
            [(into[each.content][each.piece], each.source) for each in receives],
        )

    def _room(
        self, hop: int, like: dict[int, Tensor], *, last_hop: int, dtype: torch.dtype | None = None
    ) -> dict[int, Tensor]:
        """Make room for what concerns the shards met at `hop`, up to hop degree + `last_hop` of each ring."""
        room = {}
        for piece, (_, _, position, degree) in self._rings.items():
            if hop <= degree + last_hop:
                tokens = self._program.shard_tokens(piece, (position - hop) % degree)
                room[piece] = like[piece].new_empty(2, tokens, *like[piece].shape[2:], dtype=dtype)
        return room


class _Nothing:
    """What a rank waits for when nothing was posted."""

    def wait(self) -> None:
        pass


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are merged and summed: fp32, or fp64 under fp64."""
    return torch.promote_types(dtype, torch.float32)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, planned: PlannedAttention, scale: float) -> Tensor:
        out, lse = planned.forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.planned, ctx.scale = planned, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        dq, dk, dv = ctx.planned.backward(grad_outputs[0], *ctx.saved_tensors, ctx.scale)
        return dq, dk, dv, None, None


def planned_attention(q: Tensor, k: Tensor, v: Tensor, planned: PlannedAttention, *, scale: float) -> Tensor:
    """Attend within each sequence of a microbatch, causally, wherever its tokens are.

    q is (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim): this rank's tokens in the order of
    `MicrobatchProgram.segments`. Returns (tokens, heads, head_dim).
    """
    planned.layers_run += 1
    return _Attention.apply(q, k, v, planned, scale)
