"""One block of attention with its log-sum-exp, forward and backward.

Shapes here: q, out, grad_out are (q tokens, heads, head_dim); k, v are (kv tokens, kv_heads, head_dim); lse is
(heads, q tokens). heads is a multiple of kv_heads (GQA). A block is fully visible, or square and causal, or has a mask
(q tokens, kv tokens) that says True where a query sees a key; then `causal` says nothing. A row that sees no key is
never asked for: the CPU kernel gives it lse 0, which a merge would take for a weight.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class BlockKernel(Protocol):
    """Attention over one block."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in at least fp32)."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's share of (dq, dk, dv), given `out` and `lse` of ALL keys, not of this block."""
        ...


class FlashCpuKernel:
    """The flash attention of torch on CPU: fp64, fp32 and bf16, GQA without repeating heads."""

    name = "torch flash attention for CPU"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(q),
            _batched(k),
            _batched(v),
            0.0,
            causal and mask is None,
            attn_mask=_added(mask, q.dtype),
            scale=scale,
        )
        return _unbatched(out), lse[0]

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batched(grad_out),
            _batched(q),
            _batched(k),
            _batched(v),
            _batched(out),
            # The kernel reads lse as laid out (batch, tokens, heads), whatever its strides say.
            lse.t().contiguous().t()[None],
            0.0,
            causal and mask is None,
            attn_mask=_added(mask, q.dtype),
            scale=scale,
        )
        dq, dk, dv = (_unbatched(grad) for grad in grads)
        return dq, dk, dv


class ReferenceKernel:
    """Plain matrix products and softmax on any device: slow, quadratic in memory, and easy to believe."""

    name = "reference"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        scores = _scores(q, k, causal=causal, scale=scale, mask=mask)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse[..., None])
        out = torch.einsum("hqk,khd->qhd", weights, _grouped(v, q.shape[1]).to(weights.dtype))
        return out.to(q.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        heads, kv_heads = q.shape[1], k.shape[1]
        scores = _scores(q, k, causal=causal, scale=scale, mask=mask)
        wide = scores.dtype
        weights = torch.exp(scores - lse[..., None])
        delta = (grad_out.to(wide) * out.to(wide)).sum(-1).t()
        dv = torch.einsum("hqk,qhd->khd", weights, grad_out.to(wide))
        dweights = torch.einsum("qhd,khd->hqk", grad_out.to(wide), _grouped(v, heads).to(wide))
        dscores = weights * (dweights - delta[..., None]) * scale
        dq = torch.einsum("hqk,khd->qhd", dscores, _grouped(k, heads).to(wide))
        dk = torch.einsum("hqk,qhd->khd", dscores, q.to(wide))
        dk, dv = (grad.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for grad in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def choose_kernel(device: torch.device) -> BlockKernel:
    """Return the fastest kernel for `device`."""
    return FlashCpuKernel() if device.type == "cpu" else ReferenceKernel()


def _batched(x: Tensor) -> Tensor:
    """(tokens, heads, dim) -> (1, heads, tokens, dim), as torch's kernels have it; a view where they can read one."""
    # The raw kernel takes the last stride for 1 without a look: an expanded gradient would be read as other memory.
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)[None]


def _unbatched(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), _grouped(k, q.shape[1]).to(wide)) * scale
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Write a mask as the kernel wants it: added to the scores, in the dtype of the queries."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
