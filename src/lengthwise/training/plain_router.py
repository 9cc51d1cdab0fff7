"""The routers' balance loss in one process, for `verify`: Hugging Face's own function on all sequences together.

None of the code that is checked is used here. The graphs of all sequences at once would need the memory of the whole
batch, so the chain rule is cut at the router logits: a first pass without gradients collects them, the loss is taken
of them alone, and its gradient enters the backward pass of each sequence there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lengthwise.models import coefficient_key, has_balance_loss, plain_output


def plain_balance(model: Any, sequences: Sequence[Tensor]) -> tuple[float, list[list[Tensor]]]:
    """Return (balance loss, gradients of coefficient x loss) of a plain Hugging Face model over all sequences.

    `sequences` are input ids (tokens,). The gradients are those with respect to the router logits, for each sequence
    one (tokens, experts) a layer. Where the config asks for no balance loss it is (0, no gradients).
    """
    config = model.config
    if not has_balance_loss(config):
        return 0.0, [[] for _ in sequences]
    with torch.no_grad():
        outputs = [plain_output(model, ids).router_logits for ids in sequences]
    logits = [[layer.detach().requires_grad_() for layer in layers] for layers in outputs]
    family: Any = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    together = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    loss = family.load_balancing_loss_func(together, model.num_experts, model.num_experts_per_tok)
    found = iter(
        torch.autograd.grad(
            getattr(config, coefficient_key(config.model_type)) * loss, [each for layers in logits for each in layers]
        )
    )
    return loss.item(), [[next(found) for _ in layers] for layers in logits]
