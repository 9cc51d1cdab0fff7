"""Contracts of GPU kernels on the CPU: refuse what a kernel would misread, compute in plain matrix products.

Varlen rules are those of `mha_varlen_fwd` and `mha_varlen_bwd` (torch and flash-attn share them): what is a bare
pointer there must be contiguous here, and windows are rewritten as they rewrite them before a mask is made from them.
Dense rules are those of torch's cuDNN plans. The parameters of flash-attn's functions are those of its release 2.8.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lengthwise.attention.kernels import Block, BlockMask, ReferenceKernel, Saved
from lengthwise.attention.varlen import Documents


class _SeenMask(BlockMask):
    """A mask that was made already."""

    def __init__(self, seen: Tensor) -> None:
        self._tensor = seen


class ReferenceVarlenOps:
    """`VarlenOps` in any dtype; `calls` counts forward and backward calls. Without `caps_scores` a cap is left out."""

    name = "reference varlen"

    def __init__(self, *, caps_scores: bool = False) -> None:
        self.calls, self.caps_scores = 0, caps_scores
        self._kernel = ReferenceKernel()

    def forward(self, block: Block, documents: Documents) -> tuple[Tensor, Tensor]:
        self.calls += 1
        q = block.q
        _check(documents, q, block.k, block.v)
        block = block if self.caps_scores else replace(block, softcap=None)
        out = torch.full_like(q, float("nan"))
        lse = torch.full((q.shape[1], len(q)), float("nan"), dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, cols, mask in _documents(documents):
            out[rows], lse[:, rows] = self._kernel.forward(_document(block, rows, cols, mask))
        return out, lse

    def backward(
        self, grad_out: Tensor, block: Block, saved: Saved, documents: Documents
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        q, out, lse = block.q, saved.out, saved.lse
        _check(documents, q, block.k, block.v, out, grad_out)
        assert lse.is_contiguous(), "lse is read as a bare pointer"
        assert lse.shape == (q.shape[1], len(q)), f"lse {tuple(lse.shape)} beside q {tuple(q.shape)}"
        block = block if self.caps_scores else replace(block, softcap=None)
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, block.k, block.v))
        for rows, cols, mask in _documents(documents):
            dq[rows], dk[cols], dv[cols] = self._kernel.backward(
                grad_out[rows], _document(block, rows, cols, mask), Saved(out=out[rows], lse=lse[:, rows])
            )
        return dq, dk, dv


class ReferenceFlashAttn:
    """What stands for `flash_attn.flash_attn_interface`: its raw varlen functions, by its names, places and types."""

    def _flash_attn_varlen_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        others = (alibi_slopes, block_table, leftpad_k, seqused_k)
        assert not any((dropout_p, return_softmax, zero_tensors, *others)), "nothing else is computed here"
        borders = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        documents = _AsCalled.of(borders, causal, (window_size_left, window_size_right))
        block = Block(q=q, k=k, v=v, scale=softmax_scale, softcap=_cap(softcap))
        out, lse = ReferenceVarlenOps(caps_scores=True).forward(block, documents)
        return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        assert not any((dropout_p, alibi_slopes, zero_tensors)), "nothing else is computed here"
        assert deterministic is torch.are_deterministic_algorithms_enabled(), f"deterministic: {deterministic}"
        assert rng_state is not None, "the kernel names it, though without dropout it reads nothing there"
        borders = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        documents = _AsCalled.of(borders, causal, (window_size_left, window_size_right))
        block, saved = Block(q=q, k=k, v=v, scale=softmax_scale, softcap=_cap(softcap)), Saved(out=out, lse=softmax_lse)
        grads = ReferenceVarlenOps(caps_scores=True).backward(dout, block, saved, documents)
        for into, x, grad in zip((dq, dk, dv), (q, k, v), grads, strict=True):
            assert into is not None, "gradients are read where they were to be written"
            assert (into.shape, into.dtype, into.stride(-1)) == (x.shape, x.dtype, 1), f"{into.shape}, {into.stride()}"
            into.copy_(grad)
        return torch.empty(q.shape[1], len(q) + 128 * (len(cu_seqlens_q) - 1))  # which nobody needs


@dataclass(frozen=True, slots=True, kw_only=True)
class _AsCalled(Documents):
    """Documents with a window as flash-attn gets it, -1 for no limit."""

    window_right: int

    @classmethod
    def of(cls, borders: tuple[Tensor, Tensor, int, int], causal: bool, window: tuple[int, int]) -> _AsCalled:
        """Take what an operator's schema would let through."""
        assert all(type(each) is int for each in (*borders[2:], *window)), f"integers, got {borders[2:]} and {window}"
        assert type(causal) is bool, f"causal: {causal}"
        return cls(
            cu_seqlens_q=borders[0],
            cu_seqlens_k=borders[1],
            max_seqlen_q=borders[2],
            max_seqlen_k=borders[3],
            causal=causal,
            window_left=window[0],
            window_right=window[1],
        )

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right), as they came."""
        return self.window_left, self.window_right


def _cap(softcap: float) -> float | None:
    assert type(softcap) is float, f"the kernel wants 0.0 for no cap, got {softcap}"
    return softcap or None


class ReferenceDenseOps:
    """`DenseOps` in any dtype; `shapes` lists (queries, keys, causal) of each call."""

    name = "reference dense"

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, bool]] = []
        self._kernel = ReferenceKernel()

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        self._take(block, block.q, block.k, block.v)
        return self._kernel.forward(block)

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        self._take(block, grad_out, block.q, block.k, block.v, saved.out, saved.lse)
        assert saved.lse.shape == (block.q.shape[1], len(block.q)), f"lse {tuple(saved.lse.shape)}"
        assert saved.lse.isfinite().all(), "weights of rows that were appended must be finite"
        return self._kernel.backward(grad_out, block, saved)

    def _take(self, block: Block, *tensors: Tensor) -> None:
        assert block.mask is None, "no masks"
        assert all(x.is_contiguous() for x in tensors), f"strides {[x.stride() for x in tensors]}"
        assert all(x.shape[-1] % 8 == 0 for x in (block.q, block.k, block.v)), "heads in multiples of 8"
        assert not block.causal or len(block.q) == len(block.k), "causal blocks are square"
        self.shapes.append((len(block.q), len(block.k), block.causal))


def _document(block: Block, rows: slice, cols: slice, mask: BlockMask) -> Block:
    return replace(block, q=block.q[rows], k=block.k[cols], v=block.v[cols], causal=False, mask=mask)


def _check(documents: Documents, *tensors: Tensor) -> None:
    for x in tensors:
        step = 16 // x.element_size()
        assert x.stride(-1) == 1, f"the last dimension must be contiguous, got strides {x.stride()}"
        assert all(each % step == 0 for each in (*x.stride()[:-1], x.storage_offset())), f"unaligned: {x.stride()}"
        assert x.shape[-1] % 8 == 0, f"heads in multiples of 8, got {x.shape[-1]}"
        assert x.shape[-1] <= 256, f"heads of at most 256, got {x.shape[-1]}"
        assert x.dtype == tensors[0].dtype, f"one dtype, got {x.dtype} beside {tensors[0].dtype}"
    for borders, most in (
        (documents.cu_seqlens_q, documents.max_seqlen_q),
        (documents.cu_seqlens_k, documents.max_seqlen_k),
    ):
        assert borders.dtype == torch.int32, f"borders in int32, got {borders.dtype}"
        assert most == int(borders.diff().max()), f"the longest is {int(borders.diff().max())}, got {most}"
    assert int(documents.cu_seqlens_q[-1]) == len(tensors[0]), "borders must reach the last query"
    assert int(documents.cu_seqlens_k[-1]) == len(tensors[1]), "borders must reach the last key"


def _documents(documents: Documents) -> Iterator[tuple[slice, slice, BlockMask]]:
    """Yield (queries, keys, mask) of each document, the mask as the kernels' C++ makes it from their arguments."""
    left, right = (-1 if each is None else each for each in documents.window)
    if documents.causal:
        right = 0
    if left >= documents.max_seqlen_k:
        left = -1
    if right >= documents.max_seqlen_k:
        right = -1
    if left < 0 and right >= 0:
        left = documents.max_seqlen_k
    if left >= 0 and right < 0:
        right = documents.max_seqlen_k
    q_borders, k_borders = documents.cu_seqlens_q.tolist(), documents.cu_seqlens_k.tolist()
    for q_start, q_stop, k_start, k_stop in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False):
        queries, keys = q_stop - q_start, k_stop - k_start
        gap = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if left >= 0:
            seen = (gap >= -left) & (gap <= right)
        assert seen.any(1).all(), "a query without a visible key"
        yield slice(q_start, q_stop), slice(k_start, k_stop), _SeenMask(seen)
