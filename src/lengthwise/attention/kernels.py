"""One block of attention with its log-sum-exp, forward and backward.

Shapes here: q, out, grad_out are (q tokens, heads, head_dim); k, v are (kv tokens, kv_heads, head_dim); lse is
(heads, q tokens). heads is a multiple of kv_heads (GQA). A block is fully visible, or square and causal, or has a
`BlockMask` that says which keys a query sees; then `causal` says nothing. A row that sees no key is never asked for:
the CPU kernel gives it lse 0, which a merge would take for a weight. Kernels for GPUs are in `cuda_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class BlockMask:
    """Which keys the queries of a block see: fewer than `window` tokens back and, if `causal`, none ahead.

    `distance` is the first query's token less the first key's. Kernels read it as they can: as a tensor, or as a window
    that counts from the last query and key (flash kernels align blocks there; see `program.blocks`).
    """

    def __init__(self, *, queries: int, keys: int, distance: int, causal: bool, window: int | None) -> None:
        assert not causal or keys - queries == distance, f"{queries} queries end before the last of {keys} keys"
        self.causal = causal
        self._shape, self._distance, self._window = (queries, keys), distance, window
        self._tensor: Tensor | None = None

    @property
    def window_left(self) -> int | None:
        """How many keys before the one at its place, counted from the ends, a query sees; None: all of them."""
        if self._window is None:
            return None
        queries, keys = self._shape
        left = keys - queries - self._distance + self._window - 1
        assert left >= 0, f"the last of {queries} queries sees none of {keys} keys; as a window that would mean all"
        return left

    def tensor(self, device: torch.device) -> Tensor:
        """Return the mask (queries, keys) on `device`, True where a query sees a key; made once."""
        if self._tensor is None:
            queries, keys = self._shape
            rows = torch.arange(queries, device=device)[:, None] + self._distance
            gap = rows - torch.arange(keys, device=device)
            self._tensor = (gap < (self._window or queries + keys + self._distance)) & ((gap >= 0) | (not self.causal))
        return self._tensor


class BlockKernel(Protocol):
    """Attention over one block.

    `token_multiple`: to what multiple a rank's token count is rounded up, outside attention, for few shapes.
    """

    name: str
    token_multiple: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: BlockMask | None = None
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
        mask: BlockMask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's share of (dq, dk, dv), given `out` and `lse` of ALL keys, not of this block."""
        ...


class FlashCpuKernel:
    """The flash attention of torch on CPU: fp64, fp32 and bf16, GQA without repeating heads."""

    name = "torch flash attention for CPU"

    def __init__(self, *, token_multiple: int = 1) -> None:
        self.token_multiple = token_multiple

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: BlockMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            batched(q),
            batched(k),
            batched(v),
            0.0,
            causal and mask is None,
            attn_mask=_added(mask, q),
            scale=scale,
        )
        return unbatched(out), lse[0]

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
        mask: BlockMask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            batched(grad_out),
            batched(q),
            batched(k),
            batched(v),
            batched(out),
            # The kernel reads lse as laid out (batch, tokens, heads), whatever its strides say.
            lse.t().contiguous().t()[None],
            0.0,
            causal and mask is None,
            attn_mask=_added(mask, q),
            scale=scale,
        )
        dq, dk, dv = (unbatched(grad) for grad in grads)
        return dq, dk, dv


class ReferenceKernel:
    """Plain matrix products and softmax on any device and in any dtype: slow, and easy to believe.

    Memory is bounded: at most `most_scores` of a block are there at a time (some 1 GB in fp64 by default).
    """

    name = "reference (matrix products)"

    def __init__(self, *, token_multiple: int = 1, most_scores: int = 1 << 27) -> None:
        self.token_multiple, self._most_scores = token_multiple, most_scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: BlockMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        seen, outs, lses = _seen(q, k, causal=causal, mask=mask), [], []
        values = grouped(v, q.shape[1])
        for rows in self._tiles(q, k):
            scores = _scores(q[rows], k, scale=scale, seen=None if seen is None else seen[rows])
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse[..., None])
            outs.append(torch.einsum("hqk,khd->qhd", weights, values.to(weights.dtype)).to(q.dtype))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses, dim=1)

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
        mask: BlockMask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        heads, kv_heads = q.shape[1], k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        seen, keys, values = _seen(q, k, causal=causal, mask=mask), grouped(k, heads).to(wide), grouped(v, heads)
        dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(keys)
        for rows in self._tiles(q, k):
            scores = _scores(q[rows], k, scale=scale, seen=None if seen is None else seen[rows])
            weights = torch.exp(scores - lse[:, rows, None])
            grad = grad_out[rows].to(wide)
            delta = (grad * out[rows].to(wide)).sum(-1).t()
            dv += torch.einsum("hqk,qhd->khd", weights, grad)
            dscores = weights * (torch.einsum("qhd,khd->hqk", grad, values.to(wide)) - delta[..., None]) * scale
            dqs.append(torch.einsum("hqk,khd->qhd", dscores, keys).to(q.dtype))
            dk += torch.einsum("hqk,qhd->khd", dscores, q[rows].to(wide))
        dk, dv = (grad.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for grad in (dk, dv))
        return torch.cat(dqs), dk.to(k.dtype), dv.to(v.dtype)

    def _tiles(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        step = max(1, self._most_scores // (q.shape[1] * len(k)))
        return (slice(start, start + step) for start in range(0, len(q), step))


def batched(x: Tensor) -> Tensor:
    """(tokens, heads, dim) -> (1, heads, tokens, dim), as torch's kernels have it; a view where they can read one."""
    # The raw kernel takes the last stride for 1 without a look: an expanded gradient would be read as other memory.
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)[None]


def unbatched(x: Tensor) -> Tensor:
    """(1, heads, tokens, dim) -> (tokens, heads, dim), a view."""
    return x[0].transpose(0, 1)


def grouped(x: Tensor, heads: int) -> Tensor:
    """Repeat each of the kv heads of (tokens, kv_heads, dim) for the query heads that share it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _seen(q: Tensor, k: Tensor, *, causal: bool, mask: BlockMask | None) -> Tensor | None:
    if mask is not None:
        return mask.tensor(q.device)
    return torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril() if causal else None


def _scores(q: Tensor, k: Tensor, *, scale: float, seen: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), grouped(k, q.shape[1]).to(wide)) * scale
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def _added(mask: BlockMask | None, q: Tensor) -> Tensor | None:
    """Write a mask as the kernel wants it: added to the scores, in the dtype of the queries."""
    if mask is None:
        return None
    seen = mask.tensor(q.device)
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
