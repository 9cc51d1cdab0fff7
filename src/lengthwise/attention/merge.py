"""Merge partial attention over disjoint keys: exact, in fp32 or wider, without ever taking exp of a large number.

For one query, out = sum_b exp(lse_b - lse) out_b with lse = log sum_b exp(lse_b). Two at a time, the new block's weight
is w = sigmoid(lse_b - lse_a), so that out = out_a + w (out_b - out_a) and lse = lse_a - logsigmoid(lse_a - lse_b).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block into the running result, in place.

    `out` (tokens, heads, head_dim) and `lse` (heads, tokens) are in the accumulation dtype.
    """
    block_lse = block_lse.to(lse.dtype)
    weight = (block_lse - lse).sigmoid().t()[..., None]
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype))
    lse.sub_(F.logsigmoid(lse - block_lse))
