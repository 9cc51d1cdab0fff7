"""Raw attention calls for GPUs: torch's flash attention, the package flash-attn's, and torch's efficient attention.

Public functions return no log-sum-exp, or have no backward that takes one. `varlen_attn` calls
`aten._flash_attention_forward`; its own operators change with every release. Dropout is zero, so seeds are not read.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

from lengthwise.attention.kernels import Block, Gradients, ReferenceKernel, Saved, batched, grouped, unbatched
from lengthwise.attention.varlen import TOKEN_MULTIPLE, Documents

_LSE_MULTIPLE = 32


class TorchVarlenOps:
    """Flash attention of torch, or FA3 if `activated`: every call sets it, because torch has one per process."""

    caps_scores = False

    def __init__(self, *, activated: str | None = None) -> None:
        self.name = f"torch flash attention{f' {activated[-1]}' if activated else ''}, varlen"
        self._activated = activated

    def forward(self, block: Block, documents: Documents) -> tuple[Tensor, Tensor]:
        """Compute out and lse (see `VarlenOps.forward`)."""
        activate_flash(self._activated)
        q, k, v = block.q, block.k, block.v
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_borders(documents), 0.0, documents.causal, False, **_scale_and_window(block, documents)
        )
        return out, lse

    def backward(self, grad_out: Tensor, block: Block, saved: Saved, documents: Documents) -> Gradients:
        """Compute gradients (see `VarlenOps.backward`)."""
        activate_flash(self._activated)
        device = block.q.device
        return torch.ops.aten._flash_attention_backward(
            *(grad_out, block.q, block.k, block.v, saved.out, saved.lse),
            *_borders(documents),
            0.0,
            documents.causal,
            torch.zeros(2, dtype=torch.uint64, device=device),
            torch.empty(0, device=device),
            **_scale_and_window(block, documents),
        )


class FlashAttnOps:
    """Flash attention 2 of the package flash-attn, 2.8 or later: torch's has no argument for a cap.

    package: its module of raw calls, imported by the first call, so that the comparison at a start also finds a package
    built for another torch.
    """

    name = "flash attention 2 of flash-attn, varlen"
    caps_scores = True

    def __init__(self, package: Any = None) -> None:
        self._given = package

    def forward(self, block: Block, documents: Documents) -> tuple[Tensor, Tensor]:
        """Compute out and lse (see `VarlenOps.forward`)."""
        out, lse, *_ = self._package._flash_attn_varlen_forward(
            block.q, block.k, block.v, *_borders(documents), **self._keywords(block, documents)
        )
        return out, lse

    def backward(self, grad_out: Tensor, block: Block, saved: Saved, documents: Documents) -> Gradients:
        """Compute gradients (see `VarlenOps.backward`)."""
        q, k, v = block.q, block.k, block.v
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._package._flash_attn_varlen_backward(
            *(grad_out, q, k, v, saved.out, saved.lse, dq, dk, dv),
            *_borders(documents),
            **self._keywords(block, documents),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=torch.empty(2, dtype=torch.int64, device=q.device),
        )
        return dq, dk, dv

    @cached_property
    def _package(self) -> Any:
        return self._given or importlib.import_module("flash_attn.flash_attn_interface")

    def _keywords(self, block: Block, documents: Documents) -> dict[str, Any]:
        left, right = (-1 if limit is None else limit for limit in documents.window)
        return {
            "dropout_p": 0.0,
            "softmax_scale": block.scale,
            "causal": documents.causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": block.softcap or 0.0,
            "alibi_slopes": None,
        }


class EfficientKernel:
    """torch's memory-efficient attention, fp32 and bf16; blocks with a mask go to the reference.

    Keys need as many heads as queries; lse rows are padded to a multiple of 32 with +inf.
    """

    name = "torch efficient attention, block by block"
    caps_scores = False

    def __init__(self, *, token_multiple: int = TOKEN_MULTIPLE) -> None:
        self.token_multiple = token_multiple
        self._masked = ReferenceKernel(token_multiple=token_multiple)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        if block.mask is not None:
            return self._masked.forward(block)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *_with_all_heads(block), None, True, 0.0, block.causal, scale=block.scale
        )
        return unbatched(out), lse[0, :, : len(block.q)]

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        if block.mask is not None:
            return self._masked.backward(grad_out, block, saved)
        heads, kv_heads = block.q.shape[1], block.k.shape[1]
        seed = torch.zeros((), dtype=torch.int64, device=block.q.device)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            batched(grad_out),
            *_with_all_heads(block),
            None,
            batched(saved.out.contiguous()),  # the kernel assumes (tokens, heads, head_dim) without gaps
            F.pad(saved.lse, (0, -len(block.q) % _LSE_MULTIPLE), value=float("inf")).contiguous()[None],
            seed,
            seed,
            0.0,
            [True, True, True, False],
            block.causal,
            scale=block.scale,
        )
        dq, dk, dv = (unbatched(grad) for grad in grads[:3])
        dk, dv = (grad.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for grad in (dk, dv))
        return dq, dk, dv


def _with_all_heads(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    heads = block.q.shape[1]
    return batched(block.q), batched(grouped(block.k, heads)), batched(grouped(block.v, heads))


def _borders(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    return documents.cu_seqlens_q, documents.cu_seqlens_k, documents.max_seqlen_q, documents.max_seqlen_k


def activate_flash(implementation: str | None) -> None:
    """Set this process's flash attention of torch: FA3, or torch's own if None."""
    if current_flash_attention_impl() != implementation:
        if implementation is None:
            restore_flash_attention_impl()
        else:
            activate_flash_attention_impl(implementation)


def _scale_and_window(block: Block, documents: Documents) -> dict[str, Any]:
    left, right = documents.window
    return {"scale": block.scale, "window_size_left": left, "window_size_right": right}
