"""cuDNN's attention for long blocks, and a kernel that uses it for these and a varlen kernel for all others.

cuDNN's plans for a shape take 80 ms of the host, so diagonal blocks are padded to few lengths. torch finds plans by
shapes and strides of q, k and v only, so all operands are contiguous. The limits are measured:
docs/decisions/attention-by-length.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthwise.attention.kernels import Block, BlockKernel, Gradients, Saved, unbatched
from lengthwise.attention.packs import Pack, PackKernel
from lengthwise.attention.varlen import HEAD_DIM_MULTIPLE, TOKEN_MULTIPLE

DIAGONAL_TOKENS = 4096  # tokens of a causal block from which cuDNN's gain pays for its plans
FULL_TOKENS = 8192  # queries and keys of another block, whose lengths cannot be rounded
_LENGTH_MULTIPLE = 256


class DenseOps(Protocol):
    """Raw calls on one block without a mask. All tensors are contiguous, lse (heads, q tokens)."""

    name: str

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return (out, lse in fp32 or wider)."""
        ...

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        ...


class CudnnOps:
    """cuDNN as torch calls it: with grouped heads, and masks counted from the first query and key."""

    name = "cuDNN"

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute out and lse (see `DenseOps.forward`)."""
        operands = (x.transpose(0, 1)[None] for x in (block.q, block.k, block.v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *operands, None, True, 0.0, block.causal, False, scale=block.scale
        )
        return unbatched(out), lse.reshape(block.q.shape[1], len(block.q))

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute gradients (see `DenseOps.backward`)."""
        operands = (x.transpose(0, 1)[None] for x in (grad_out, block.q, block.k, block.v, saved.out))
        seed = torch.zeros((), dtype=torch.int64, device=grad_out.device)  # unused, as dropout is 0
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *operands,
            saved.lse[None, :, :, None],
            *(seed, seed, None, None, None),
            *(len(block.q), len(block.k), 0.0, block.causal),
            scale=block.scale,
        )
        return unbatched(dq), unbatched(dk), unbatched(dv)


class DenseKernel:
    """A `BlockKernel` over dense calls, for blocks without a mask."""

    caps_scores = False

    def __init__(self, ops: DenseOps, *, token_multiple: int = TOKEN_MULTIPLE) -> None:
        self.name, self.token_multiple, self._ops = ops.name, token_multiple, ops

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        out, lse = self._ops.forward(_rounded(block))
        return out[: len(block.q), :, : block.q.shape[-1]], lse[:, : len(block.q)]

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        rounded = _rounded(block)
        rows, tokens = len(rounded.q), len(block.q)
        # Appended rows have no gradient and a finite lse, so their weights are finite, and add zeros.
        saved = Saved(out=_padded(saved.out, rows), lse=F.pad(saved.lse, (0, rows - tokens)).contiguous())
        dq, dk, dv = self._ops.backward(_padded(grad_out, rows), rounded, saved)
        keys, head_dim = len(block.k), block.q.shape[-1]
        return dq[:tokens, :, :head_dim], dk[:keys, :, :head_dim], dv[:keys, :, :head_dim]


class ByLengthKernel:
    """A `PackKernel` of two. long: kernel of long blocks and documents, one a call. rest: kernel of all others."""

    caps_scores = False

    def __init__(
        self,
        long: BlockKernel,
        rest: PackKernel,
        *,
        diagonal_tokens: int = DIAGONAL_TOKENS,
        full_tokens: int = FULL_TOKENS,
    ) -> None:
        self.name = f"{long.name} from {diagonal_tokens:,} tokens of one document on, else {rest.name}"
        self.token_multiple, self.long, self.diagonal_tokens = rest.token_multiple, long, diagonal_tokens
        self.rest, self._least = rest, {True: diagonal_tokens, False: full_tokens}

    @property
    def alone_from(self) -> int | None:
        """Tokens from which `long` computes a document (see `PackKernel.alone_from`)."""
        return None if torch.are_deterministic_algorithms_enabled() else self.diagonal_tokens

    @property
    def full_from(self) -> int | None:
        """Queries and keys from which `long` computes a block (see `PackKernel.full_from`)."""
        return None if torch.are_deterministic_algorithms_enabled() else self._least[False]

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Compute one block (see `BlockKernel.forward`)."""
        return (self.long if self._is_long(block) else self.rest).forward(block)

    def backward(self, grad_out: Tensor, block: Block, saved: Saved) -> Gradients:
        """Compute one block's gradients (see `BlockKernel.backward`)."""
        return (self.long if self._is_long(block) else self.rest).backward(grad_out, block, saved)

    def forward_pack(self, block: Block, pack: Pack) -> tuple[Tensor, Tensor]:
        """Compute all documents (see `PackKernel.forward_pack`)."""
        if self._is_one(block, pack):
            return self.long.forward(block)
        return self.rest.forward_pack(block, pack)

    def backward_pack(self, grad_out: Tensor, block: Block, saved: Saved, pack: Pack) -> Gradients:
        """Compute all documents' gradients (see `PackKernel.backward_pack`)."""
        if self._is_one(block, pack):
            return self.long.backward(grad_out, block, saved)
        return self.rest.backward_pack(grad_out, block, saved, pack)

    def _is_long(self, block: Block) -> bool:
        # Its backward is never deterministic: if determinism is asked for, the varlen kernel computes all.
        is_long = min(block.q.shape[0], block.k.shape[0]) >= self._least[block.causal]
        return is_long and block.mask is None and not torch.are_deterministic_algorithms_enabled()

    def _is_one(self, block: Block, pack: Pack) -> bool:
        # Causality hides padding after the document, and nobody reads the results of padding.
        documents = pack.cu_seqlens.shape[0] - 1 - (pack.padding > 0)
        is_whole = documents == 1 and (pack.window is None or pack.window >= pack.max_seqlen)
        return pack.keys is None and is_whole and self._is_long(block)


def _rounded(block: Block) -> Block:
    """Close gaps, pad heads to multiples of 8, and append zeros to a causal block up to a rounded length."""
    assert block.mask is None, "masked blocks are for another kernel"
    more = -len(block.q) % _LENGTH_MULTIPLE if block.causal else 0
    q, k, v = (_padded(x, len(x) + more) for x in (block.q, block.k, block.v))
    return replace(block, q=q, k=k, v=v)


def _padded(x: Tensor, rows: int) -> Tensor:
    more = (-x.shape[-1] % HEAD_DIM_MULTIPLE, rows - len(x))
    return (F.pad(x, (0, more[0], 0, 0, 0, more[1])) if any(more) else x).contiguous()
