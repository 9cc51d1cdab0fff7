"""Attention and its error as the textbook has them: one document, all scores at once, autograd for the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    mutual: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    """Attend over one whole document in the dtype of the tensors; differentiable, any GQA ratio.

    q is (q tokens, heads, head_dim), k and v (kv tokens, kv_heads, head_dim). A query sees fewer than `window` tokens
    back; `sinks` (heads,) are logits of a key without a value; `softcap` bounds scores by
    tanh; tokens of each (start, stop) of `mutual` see each other. Returns (out like q, lse (heads, q), sinks left out).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    gap = torch.arange(q.shape[0])[:, None] - torch.arange(k.shape[1])
    hidden = (gap < 0) & torch.tensor(causal) | (gap >= (window or len(gap) + 1))
    for start, stop in mutual:
        hidden[start:stop, start:stop] &= gap[start:stop, start:stop] >= 0
    scores = scores.masked_fill(hidden, float("-inf"))
    logits = scores if sinks is None else torch.cat((scores, sinks[:, None, None].expand(-1, len(gap), 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1), torch.logsumexp(scores, dim=-1)


def relative_error(got: Tensor, expected: Tensor, *, floor: float = 1e-300) -> float:
    """Return the L2 norm of the difference over that of `expected` (or `floor`), in fp64; NaN counts as infinite."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape, f"shapes differ: {tuple(got.shape)} and {tuple(expected.shape)}"
    error = ((got - expected).norm() / max(expected.norm().item(), floor)).item() if got.numel() else 0.0
    return error if error == error else float("inf")


def rounding_floor(*gradients: Tensor) -> float:
    """Return the norm under which a gradient of narrow floats is what larger terms leave when they cancel.

    With one key dq and dk are zero, the difference of terms as large as dv: a tenth of the largest norm among them.
    """
    return 0.1 * max(each.norm().item() for each in gradients)
