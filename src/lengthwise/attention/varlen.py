"""Blocks and packs through a varlen flash kernel: torch's own, one that torch activates, or flash-attn's.

Documents lie in a row, borders are int32 `cu_seqlens`, masks count from the last query and key, and the raw backward
takes out and lse of ALL keys. `VarlenOps` are the raw calls; tests use a reference that refuses operands which kernels
misread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthwise.attention.kernels import Block, Gradients, Saved
from lengthwise.attention.packs import Pack

TOKEN_MULTIPLE = 128
HEAD_DIM_MULTIPLE = 8
MOST_HEAD_DIM = 256
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Borders of documents among queries and keys, and the keys that a query sees in its document.

    window_left: number of keys before the query's own place, counted from the ends, None for all. causal: True if it
    sees no later key.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_left: int | None

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right) for flash kernels, None without a limit: flash attention 4 has no windows (torch 2.11)."""
        return (None, None) if self.window_left is None else (self.window_left, 0 if self.causal else None)


class VarlenOps(Protocol):
    """Raw calls on tensors that `VarlenKernel` has prepared; `documents` alone decides which keys a query sees."""

    name: str
    caps_scores: bool

    def forward(self, block: Block, documents: Documents) -> tuple[Tensor, Tensor]:
        """Return (out (q tokens, heads, head_dim), lse (heads, q tokens) in fp32 or wider)."""
        ...

    def backward(self, grad_out: Tensor, block: Block, saved: Saved, documents: Documents) -> Gradients:
        """Return (dq, dk, dv)."""
        ...


class VarlenKernel:
    """A `PackKernel` over varlen calls."""

    alone_from = full_from = None

    def __init__(self, ops: VarlenOps, *, token_multiple: int = TOKEN_MULTIPLE) -> None:
        self.name, self.caps_scores, self.token_multiple, self._ops = ops.name, ops.caps_scores, token_multiple, ops

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        return self._forward(block, _one(block))

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        return self._backward(grad_out, block, saved, _one(block))

    def forward_pack(self, block: Block, pack: Pack) -> tuple[Tensor, Tensor]:
        """Compute all documents (see `PackKernel.forward_pack`)."""
        return self._forward(block, _all(pack))

    def backward_pack(self, grad_out: Tensor, block: Block, saved: Saved, pack: Pack) -> Gradients:
        """Compute all documents' gradients (see `PackKernel.backward_pack`)."""
        return self._backward(grad_out, block, saved, _all(pack))

    def _forward(self, block: Block, documents: Documents) -> tuple[Tensor, Tensor]:
        out, lse = self._ops.forward(_readable(block), documents)
        return out[..., : block.q.shape[-1]], lse

    def _backward(self, grad_out: Tensor, block: Block, saved: Saved, documents: Documents) -> Gradients:
        # The kernel reads lse as contiguous (heads, tokens): a slice of a larger tensor would be other memory.
        saved = Saved(out=_aligned(saved.out), lse=saved.lse.contiguous())
        dq, dk, dv = self._ops.backward(_aligned(grad_out), _readable(block), saved, documents)
        head_dim = block.q.shape[-1]
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]


def _one(block: Block) -> Documents:
    q, k, mask = block.q, block.k, block.mask
    return Documents(
        cu_seqlens_q=_border(len(q), q.device),
        cu_seqlens_k=_border(len(k), k.device),
        max_seqlen_q=len(q),
        max_seqlen_k=len(k),
        causal=block.causal if mask is None else mask.causal,
        window_left=None if mask is None else mask.window_left,
    )


@lru_cache(maxsize=256)  # blocks of all layers and passes have the same few lengths
def _border(length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later backward reads it
        return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)


def _all(pack: Pack) -> Documents:
    return Documents(
        cu_seqlens_q=pack.cu_seqlens,
        cu_seqlens_k=pack.cu_seqlens if pack.keys is None else pack.keys,
        max_seqlen_q=pack.max_seqlen,
        max_seqlen_k=pack.max_keys or pack.max_seqlen,
        causal=pack.keys is None,
        window_left=None if pack.window is None else pack.window - 1,
    )


def _readable(block: Block) -> Block:
    q, k, v = _aligned(block.q), _aligned(block.k), _aligned(block.v)
    return block if q is block.q and k is block.k and v is block.v else replace(block, q=q, k=k, v=v)


def _aligned(x: Tensor) -> Tensor:
    """Pad head_dim of (tokens, heads, head_dim) to a multiple of 8, and align rows to 16 bytes; scores stay."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    if missing:
        return F.pad(x, (0, missing)).contiguous()
    step, (of_row, of_head, of_entry) = _ALIGNMENT_BYTES // x.element_size(), x.stride()
    readable = of_entry == 1 and not (of_row % step or of_head % step or x.storage_offset() % step)
    return x if readable else x.clone(memory_format=torch.contiguous_format)
