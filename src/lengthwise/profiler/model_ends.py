"""What runs before and after a model's layers: its embedding, and its head with the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lengthwise.cost import logits_at_once
from lengthwise.models import loss_by, token_loss


def run_embedding(model: Any, ids: Tensor) -> None:
    """Run the embedding of ids (tokens,) forward, and backward if it trains; gradients accumulate."""
    found = model.get_input_embeddings()(ids[None])
    if found.requires_grad:
        found.backward(torch.ones_like(found))


def run_head(model: Any, ids: Tensor) -> None:
    """Run head and loss of labels (tokens,) forward and backward, with as many logits at once as in training."""
    head: Any = model.get_output_embeddings()
    like, width = head.weight, head.weight.shape[-1]
    words: int = model.config.vocab_size
    for some in ids.split(logits_at_once(words, on_gpus=ids.is_cuda) // words or 1):
        hidden = torch.randn(len(some), width, dtype=like.dtype, device=ids.device, requires_grad=True)
        loss_by(model, token_loss, head(hidden), some).backward()
