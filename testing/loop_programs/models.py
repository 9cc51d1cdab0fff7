"""The models, optimizers and rows of programs, and the losses that have more than a model's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MixtralForCausalLM

from testing.tiny import SIZES

VOCAB = 24
_SIZES = {**SIZES, "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_DECAY = 0.1
SUM_SCALE = 1e4  # of squares of sums over sequences, so that no loop diverges and rounding stays rounding


def make_model(kind: str) -> nn.Module:
    """Return the tiny fp64 model of a kind of `program.MODELS`, always the same values."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        of_experts = kind == "adapters of experts"
        make: Any = MixtralForCausalLM if of_experts else LlamaForCausalLM
        more: dict[str, Any] = _EXPERTS if of_experts else {}
        config = make.config_class(**_SIZES, **more, tie_word_embeddings=kind == "tied")
        config._attn_implementation = "eager"
        model: Any = make(config).double().train()
        if kind == "sharing":
            model.model.layers[1].mlp = model.model.layers[0].mlp
        if kind == "own loss":
            model.loss_function = _smoothed
        if kind == "own forward":
            model.forward = partial(_quartered, model)
        if kind == "unreached":
            model.model.layers[0].unreached = nn.Parameter(torch.randn(7, dtype=torch.float64))
        if "adapters" in kind:
            from peft import LoraConfig, get_peft_model

            targets: dict[str, Any] = {"target_modules": ["q_proj", *([] if of_experts else ["down_proj"])]}
            experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if of_experts else None
            adapters = LoraConfig(r=2, **targets, target_parameters=experts, init_lora_weights=False)
            model = get_peft_model(model, adapters).double()
    return model


def _smoothed(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: float, **_: Any) -> Tensor:
    """Return a loss of a model's own, in the form of transformers."""
    words, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return F.cross_entropy(words, labels, reduction="sum", label_smoothing=0.3) / num_items_in_batch


def _quartered(model: Any, **given: Any) -> Any:
    """Run a model forward; change its loss."""
    found = type(model).forward(model, **given)
    found.loss = None if found.loss is None else found.loss * 0.25
    return found


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of two groups with other arguments; both decay, so that gradients of zero move weights."""
    trained = [each for each in model.parameters() if each.requires_grad]
    rate = 0.05 if kind == "sgd" else 1e-2
    groups = [
        {"params": trained[::2], "lr": rate, "weight_decay": _DECAY},
        {"params": trained[1::2], "lr": 2 * rate, "weight_decay": _DECAY / 2},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9)
    return torch.optim.AdamW(groups, lr=rate, eps=1e-4)  # so large that rounding of small gradients stays rounding


def make_rows(lengths: Sequence[int], seed: int) -> list[dict[str, Tensor]]:
    """Draw rows of these lengths; the first has a loss on every token, the others on most."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        hidden = torch.rand(length, generator=generator) < (0.3 if number else 0.0)
        rows.append({"input_ids": ids, "labels": torch.where(hidden, -100, ids)})
    return rows


def make_parameter() -> nn.Parameter:
    """Return a parameter of a loss."""
    return nn.Parameter(torch.tensor(1.3, dtype=torch.float64))


def by_sums(sums: Tensor, where: str, own: Tensor, model: nn.Module) -> Tensor:
    """Return a loss of sums over sequences, and of what is beside them."""
    found = sums.square().mean() / SUM_SCALE * (own if where == "combine" else 1.0)
    if where == "combine, of weights":
        found = found + 0.01 * torch.stack([each.square().sum() for each in model.parameters()]).sum()
    return found
