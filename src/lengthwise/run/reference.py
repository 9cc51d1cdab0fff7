"""The reference of `verify`: plain Hugging Face and torch in one process, without our engine.

It shares with us only the data, and the building of a model from Hugging Face's classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor
from transformers.image_utils import load_image

from lengthwise.core.hub_access import only_cached
from lengthwise.data import NO_LOSS, Dataset
from lengthwise.models import (
    coefficient_key,
    experts_of,
    has_balance_loss,
    keep_double,
    plain_output,
    token_loss,
    whole_model,
)
from lengthwise.models.quantized import compute_in

_KINDS = ("mm_token_type_ids", "token_type_ids")  # by which models know images; not shared with the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Results of one process: mean loss over loss tokens, router loss (or 0), and gradients by parameter.

    The gradients are of loss + coefficient x router loss.
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
    processor: str = "",
    image_options: Mapping[str, Any] = MappingProxyType({}),
    on_phase: Callable[[str], None] = lambda _phase: None,
) -> Reference:
    """Compute loss and gradients of a plain Hugging Face model in this process, one sequence at a time.

    On purpose this uses no tested code to shift labels, count loss tokens and sum gradients: logits of all but the last
    position meet labels of all but the first. processor, image_options: name of the image processor of rows with
    images, and arguments of its calls.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    device, wide = next(model.parameters()).device, torch.promote_types(dtype, torch.float32)
    made = partial(_image_processor(processor), **image_options) if any(dataset.images(i) for i in ids) else None
    for parameter in (model if made is None else whole_model(model).to(device)).parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    compute_in(model, dtype)
    gradients = {name: torch.zeros_like(parameter, dtype=wide) for name, parameter in trained.items()}
    loss_sum = 0.0
    rows = [dataset.read(i, 0, int(dataset.lengths[i])) for i in ids]
    sequences, labels = (
        [torch.from_numpy(values.astype("int64")).to(device) for values in each] for each in zip(*rows, strict=True)
    )

    images = [_plain_images(model, made, dataset, i, each) for i, each in zip(ids, sequences, strict=True)]

    def run(number: int) -> Any:
        return plain_output(model, sequences[number], **images[number]())

    weights = [_plain_weights(dataset, i, each) for i, each in zip(ids, labels, strict=True)]
    together = sum(each.sum(dtype=torch.float64).item() for each in weights)
    with keep_double(dtype):
        router_loss, router_gradients = plain_balance(model, len(sequences), run)
        for number, (targets, from_routers) in enumerate(zip(labels, router_gradients, strict=True)):
            on_phase(f"sequence {number + 1}/{len(sequences)}")
            output = run(number)
            loss = token_loss(output.logits[0, :-1], targets[1:], weights[number])
            routers = output.router_logits if from_routers else ()
            torch.autograd.backward([loss / together, *routers], [torch.ones_like(loss), *from_routers])
            loss_sum += loss.item()
            for name, parameter in trained.items():  # bf16 gradients are summed in fp32
                if parameter.grad is not None:
                    gradients[name] += parameter.grad
                    parameter.grad = None
    return Reference(loss=loss_sum / together, router_loss=router_loss, gradients=gradients)


def _plain_weights(dataset: Dataset, row: int, labels: Tensor) -> Tensor:
    """Return the loss weights of a row's tokens but the first, (length - 1,); without weights, 1 per label."""
    weights = dataset.read_weights(row, 1, len(labels))
    if weights is None:
        return (labels[1:] != NO_LOSS).float()
    return torch.tensor(weights, device=labels.device)


def _image_processor(name: str) -> Any:
    return AutoImageProcessor.from_pretrained(name, local_files_only=only_cached(name), trust_remote_code=False)


def _plain_images(model: Any, made: Any, dataset: Dataset, row: int, ids: Tensor) -> Callable[[], Mapping[str, Tensor]]:
    """Return a function that reads a row's images, as transformers' image processor `made` gives them to the model."""

    def read() -> Mapping[str, Tensor]:
        paths = [each.path for each in dataset.images(row)]
        if not paths:
            return {}
        found = made(images=[load_image(path) for path in paths], return_tensors="pt")
        columns = {name: each.to(ids.device) for name, each in found.items()}
        columns |= dict.fromkeys(_KINDS, (ids == model.whole.config.image_token_id).int()[None])
        # Some processors give columns that their models do not take
        return {name: each for name, each in columns.items() if name in signature(model.whole.forward).parameters}

    return read


def plain_balance(model: Any, num_sequences: int, run: Callable[[int], Any]) -> tuple[float, list[list[Tensor]]]:
    """Return (balance loss, gradients of coefficient x loss) of a plain Hugging Face model over all sequences.

    run: function that returns the model's output for one sequence. The gradients are with respect to the router logits:
    per sequence a list of one (tokens, experts) per layer. Without a balance loss in the config the result is (0, empty
    lists). The loss is Hugging Face's own function. To hold one graph at a time, a pass without gradients collects the
    router logits, and the gradient of their loss enters the backward of every sequence.
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
