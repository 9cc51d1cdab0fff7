"""What one process gives with plain Hugging Face and torch: the reference of `verify`, which shares none of our engine.

Of ours it takes the data, the keys by which dropout draws, and a model that was built by Hugging Face's own classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.data import NO_LOSS, Dataset
from lengthwise.models import (
    ANY_KEY,
    DropoutKey,
    coefficient_key,
    experts_of,
    has_balance_loss,
    keep_double,
    plain_output,
    sequence_dropout,
    token_loss,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one process computes: mean loss over the loss tokens, router loss (0 without), gradient of each parameter.

    The gradients are those of loss + coefficient x router loss.
    """

    loss: float
    router_loss: float
    gradients: dict[str, Tensor]


def plain_gradients(
    model: nn.Module,
    dataset: Dataset,
    ids: Sequence[int],
    dtype: torch.dtype,
    *,
    dropout: DropoutKey = ANY_KEY,
    on_phase: Callable[[str], None] = lambda _phase: None,
) -> Reference:
    """Compute what a plain Hugging Face model gives in this process, one sequence at a time.

    Shift, loss-token count and sums of gradients are made here, on purpose not by the code that is checked: logits of
    all but the last position against labels of all but the first. Where the model has dropout it draws by `dropout`.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    device, wide = next(model.parameters()).device, torch.promote_types(dtype, torch.float32)
    gradients = {name: torch.zeros_like(parameter, dtype=wide) for name, parameter in trained.items()}
    loss_sum = 0.0
    rows = [dataset.read(i, 0, int(dataset.lengths[i])) for i in ids]
    sequences, labels = (
        [torch.from_numpy(values.astype("int64")).to(device) for values in each] for each in zip(*rows, strict=True)
    )

    def run(number: int) -> Any:
        with sequence_dropout(model, dropout, ids[number], sequences[number]):
            return plain_output(model, sequences[number])

    weights = [_plain_weights(dataset, i, each) for i, each in zip(ids, labels, strict=True)]
    together = sum(each.sum(dtype=torch.float64).item() for each in weights)
    with keep_double(dtype):
        router_loss, router_gradients = plain_balance(model, len(sequences), run)
        for number, (asked, from_routers) in enumerate(zip(labels, router_gradients, strict=True)):
            on_phase(f"sequence {number + 1}/{len(sequences)}")
            output = run(number)
            loss = token_loss(output.logits[0, :-1], asked[1:], weights[number])
            routers = output.router_logits if from_routers else ()
            torch.autograd.backward([loss / together, *routers], [torch.ones_like(loss), *from_routers])
            loss_sum += loss.item()
            for name, parameter in trained.items():  # in bf16 their sums are wider than they are
                if parameter.grad is not None:
                    gradients[name] += parameter.grad
                    parameter.grad = None
    return Reference(loss=loss_sum / together, router_loss=router_loss, gradients=gradients)


def _plain_weights(dataset: Dataset, row: int, labels: Tensor) -> Tensor:
    """Return what each token of a row but the first weighs, (length - 1,), by labels alone where there is no more."""
    weights = dataset.read_weights(row, 1, len(labels))
    if weights is None:
        return (labels[1:] != NO_LOSS).float()
    return torch.tensor(weights, device=labels.device)


def plain_balance(model: Any, num_sequences: int, run: Callable[[int], Any]) -> tuple[float, list[list[Tensor]]]:
    """Return (balance loss, gradients of coefficient x loss) of a plain Hugging Face model over all sequences.

    `run` gives the model's output for one of them. The gradients are with respect to the router logits, for each
    sequence one (tokens, experts) a layer; (0, no gradients) where the config asks for no balance loss. The loss is
    Hugging Face's own function. All graphs at once would need the memory of the whole batch, so the chain rule is cut
    at the router logits: a pass without gradients collects them, and the gradient of their loss enters each backward.
    """
    config = model.config
    if not has_balance_loss(config):
        return 0.0, [[] for _ in range(num_sequences)]
    with torch.no_grad():
        outputs = [run(number).router_logits for number in range(num_sequences)]
    logits = [[layer.detach().requires_grad_() for layer in layers] for layers in outputs]
    family: Any = sys.modules[type(model.get_decoder()).__module__]
    together = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    loss = family.load_balancing_loss_func(together, *experts_of(model))
    found = iter(
        torch.autograd.grad(
            getattr(config, coefficient_key(config.model_type)) * loss, [each for layers in logits for each in layers]
        )
    )
    return loss.item(), [[next(found) for _ in layers] for layers in logits]
