"""One block of attention with its log-sum-exp, forward and backward, on the CPU, and the merge of partial results.

Every row must see a key: otherwise the CPU kernel returns lse 0, which a merge would use as a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class BlockMask:
    """The keys that the queries of a block see: fewer than `window` tokens back and, if `causal`, none ahead.

    distance: first query's position minus the first key's. Flash kernels count windows from the last query and key.
    """

    def __init__(self, *, queries: int, keys: int, distance: int, causal: bool, window: int | None) -> None:
        assert not causal or keys - queries == distance, f"{queries} queries end before the last of {keys} keys"
        self.causal = causal
        self._shape, self._distance, self._window = (queries, keys), distance, window
        self._tensor: Tensor | None = None

    @property
    def window_left(self) -> int | None:
        """Number of keys that a query sees before its own place, counted from the ends, None for all."""
        if self._window is None:
            return None
        queries, keys = self._shape
        left = keys - queries - self._distance + self._window - 1
        assert left >= 0, f"the last of {queries} queries sees none of {keys} keys; as a window that would mean all"
        return left

    def tensor(self, device: torch.device) -> Tensor:
        """Return the mask (queries, keys) on `device`, True for keys that a query sees; made once."""
        if self._tensor is None:
            queries, keys = self._shape
            rows = torch.arange(queries, device=device)[:, None] + self._distance
            gap = rows - torch.arange(keys, device=device)
            self._tensor = (gap < (self._window or queries + keys + self._distance)) & ((gap >= 0) | (not self.causal))
        return self._tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries, and the keys and values that they attend to.

    q: (q tokens, heads, head_dim), heads a multiple of kv_heads. k, v: (kv tokens, kv_heads, head_dim). causal: True if
    queries of a square block see no later key; otherwise they see all. mask: seen keys, in place of `causal`. softcap:
    cap of scores, which become softcap x tanh(s / softcap); None for uncapped ones.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool = True
    mask: BlockMask | None = None
    softcap: float | None = None

    def at(self, rows: slice) -> Block:
        """Return these rows of queries, keys and values, which see only each other."""
        if rows.stop - rows.start == self.q.shape[0]:
            return self
        return replace(self, q=self.q[rows], k=self.k[rows], v=self.v[rows])


Gradients = tuple[Tensor, Tensor, Tensor]
"""(dq, dk, dv), shaped as q, k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Results of forward for backward: out (q tokens, heads, head_dim) and lse (heads, q tokens).

    Both are over ALL keys of the queries, so that the gradients of blocks add up.
    """

    out: Tensor
    lse: Tensor

    def at(self, rows: slice) -> Saved:
        """Return the results of these rows of queries."""
        if rows.stop - rows.start == self.out.shape[0]:
            return self
        return Saved(out=self.out[rows], lse=self.lse[:, rows])


class BlockKernel(Protocol):
    """Attention over one block. token_multiple: multiple to which a rank's rows are rounded up outside attention.

    caps_scores: True if it applies a block's `softcap`; others ignore it.
    """

    name: str
    token_multiple: int
    caps_scores: bool

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in at least fp32)."""
        ...

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Return the block's share of (dq, dk, dv); `grad_out` is shaped as `saved.out`."""
        ...


class FlashCpuKernel:
    """The flash attention of torch on CPU: fp64, fp32 and bf16, GQA without repeating heads."""

    name = "torch flash attention for CPU"
    caps_scores = False

    def __init__(self, *, token_multiple: int = 1) -> None:
        self.token_multiple = token_multiple

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(batched, (block.q, block.k, block.v)),
            0.0,
            block.causal and block.mask is None,
            attn_mask=_added(block),
            scale=block.scale,
        )
        return unbatched(out), lse[0]

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(batched, (grad_out, block.q, block.k, block.v, saved.out)),
            # The kernel reads lse as laid out (batch, tokens, heads), whatever its strides say.
            saved.lse.t().contiguous().t()[None],
            0.0,
            block.causal and block.mask is None,
            attn_mask=_added(block),
            scale=block.scale,
        )
        dq, dk, dv = map(unbatched, grads)
        return dq, dk, dv


class ReferenceKernel:
    """Plain matrix products and softmax in any dtype: slow, with at most `most_scores` at a time (1 GB in fp64)."""

    name = "reference (matrix products)"
    caps_scores = True

    def __init__(self, *, token_multiple: int = 1, most_scores: int = 1 << 27) -> None:
        self.token_multiple, self._most_scores = token_multiple, most_scores

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        outs, lses, values = [], [], grouped(block.v, block.q.shape[1])
        for _, scores in self._tiles(block):
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse[..., None])
            outs.append(torch.einsum("hqk,khd->qhd", weights, values.to(weights.dtype)).to(block.q.dtype))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses, dim=1)

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        q, k, v = block.q, block.k, block.v
        heads, kv_heads = q.shape[1], k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        keys, values = grouped(k, heads).to(wide), grouped(v, heads)
        dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(keys)
        for rows, scores in self._tiles(block):
            weights = torch.exp(scores - saved.lse[:, rows, None])
            grad = grad_out[rows].to(wide)
            delta = (grad * saved.out[rows].to(wide)).sum(-1).t()
            dv += torch.einsum("hqk,qhd->khd", weights, grad)
            dscores = weights * (torch.einsum("qhd,khd->hqk", grad, values.to(wide)) - delta[..., None]) * block.scale
            if block.softcap is not None:  # unseen scores are -inf, and have no gradient
                dscores *= 1 - (scores / block.softcap).clamp(min=-1).square()
            dqs.append(torch.einsum("hqk,khd->qhd", dscores, keys).to(q.dtype))
            dk += torch.einsum("hqk,qhd->khd", dscores, q[rows].to(wide))
        dk, dv = (grad.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for grad in (dk, dv))
        return torch.cat(dqs), dk.to(k.dtype), dv.to(v.dtype)

    def _tiles(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows of queries, their scores (heads, rows, kv tokens) in the wide dtype, -inf where unseen)."""
        q, wide = block.q, torch.promote_types(block.q.dtype, torch.float32)
        keys, seen = grouped(block.k, q.shape[1]).to(wide), _seen(block)
        step = max(1, self._most_scores // (q.shape[1] * len(keys)))
        for rows in (slice(start, start + step) for start in range(0, len(q), step)):
            scores = torch.einsum("qhd,khd->hqk", q[rows].to(wide), keys) * block.scale
            if block.softcap is not None:
                scores.div_(block.softcap).tanh_().mul_(block.softcap)
            yield rows, scores if seen is None else scores.masked_fill(~seen[rows], float("-inf"))


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block of other keys into the running result, in place: exact, and without exp of a large number.

    With w = sigmoid(lse_b - lse_a): out = out_a + w (out_b - out_a), lse = lse_a - logsigmoid(lse_a - lse_b), in the
    accumulation dtype. out: (tokens, heads, head_dim). lse: (heads, tokens).
    """
    block_lse = block_lse.to(lse.dtype)
    weight = (block_lse - lse).sigmoid().t()[..., None]
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype))
    lse.sub_(F.logsigmoid(lse - block_lse))


def batched(x: Tensor) -> Tensor:
    """(tokens, heads, dim) -> (1, heads, tokens, dim), for torch's kernels; a view if they can read it."""
    # The raw kernel assumes a last stride of 1: an expanded gradient would be read as other memory.
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)[None]


def unbatched(x: Tensor) -> Tensor:
    """(1, heads, tokens, dim) -> (tokens, heads, dim), a view."""
    return x[0].transpose(0, 1)


def grouped(x: Tensor, heads: int) -> Tensor:
    """Repeat each of the kv heads of (tokens, kv_heads, dim) for the query heads that share it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _seen(block: Block) -> Tensor | None:
    """Return the mask (q tokens, kv tokens) of a block, True for seen keys, or None for all."""
    q = block.q
    if block.mask is not None:
        return block.mask.tensor(q.device)
    return torch.ones(len(q), len(block.k), dtype=torch.bool, device=q.device).tril() if block.causal else None


def _added(block: Block) -> Tensor | None:
    """Return a block's mask as a tensor to add to the scores, in the dtype of the queries."""
    if block.mask is None:
        return None
    seen = block.mask.tensor(block.q.device)
    return torch.zeros(seen.shape, dtype=block.q.dtype, device=block.q.device).masked_fill(~seen, float("-inf"))
