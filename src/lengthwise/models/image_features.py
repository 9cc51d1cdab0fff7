"""Features of images in a forward, in place of the embeddings of their tokens.

A rank runs the tower on the images whose tokens it holds, and the decoder gets the features of these tokens alone. If
the tower trains, it is part of the forward's graph: each rank has the gradient by its own tokens, and their sum over
the ranks is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.models.image_kinds import KINDS
from lengthwise.models.images import FEATURES, MicrobatchImages
from lengthwise.models.loss import has_run
from lengthwise.models.text_part import trained_towers, whole_model


@contextmanager
def seeing(model: nn.Module, images: MicrobatchImages | None) -> Iterator[None]:
    """Give a model the images of a microbatch in forwards inside the block, in place of the embeddings of their tokens.

    The tower runs once per forward, with gradients if it trains. Then all embeddings require gradients, of text too:
    else a rank without images would leave out the backward of layers that do not train, and its rings.
    """
    whole, trains = whole_model(model), bool(trained_towers(model))

    def require(_module: Any, _arguments: Any, embeddings: Tensor) -> None:
        if torch.is_grad_enabled() and not embeddings.requires_grad:
            embeddings.requires_grad_()

    def give(module: Any, arguments: Any, given: dict[str, Any]) -> Any:
        if images is None or has_run(module):
            return None
        rows = given["position_ids"].shape[-1]
        found: dict[str, Any] = {}
        if images.inputs:
            found[FEATURES] = {"image": _features(module, images, trains=trains)}
        if images.positions is not None:
            found["position_ids"] = F.pad(images.positions, (0, rows - images.positions.shape[-1]))[:, None]
        return arguments, {**given, **found}

    handles = [whole.get_input_embeddings().register_forward_hook(require)] if trains else []
    if images is not None:
        handles.append(whole.model.register_forward_pre_hook(give, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_tower(model: nn.Module, images: MicrobatchImages) -> None:
    """Run the tower forward, and backward if it trains; gradients accumulate."""
    found = _features(whole_model(model).model, images, trains=bool(trained_towers(model)))
    made = [each[0] for each in (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))]
    if trained := [each for each in made if each.requires_grad]:
        torch.autograd.backward(trained, [torch.ones_like(each) for each in trained])


def _twice(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([each, each]) for name, each in inputs.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _features(model: Any, images: MicrobatchImages, *, trains: bool) -> Any:
    """Return the tower's output, of the rank's image tokens alone."""
    decoder = model.get_decoder()
    for part in model.children():  # a model to be sharded waits in host memory, and its tower with it
        if part is not decoder and any(each.device != images.features.device for each in part.parameters()):
            part.to(images.features.device)
    # A store of activations knows only those of layers, so the tower's stay on the device.
    keeping, kind = torch.autograd.graph.saved_tensors_hooks(_same, _same), KINDS[model.config.model_type]
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()), keeping:
        calls = [images.inputs]
        if kind.is_masked:
            parts = zip(*(each.split(1) for each in images.inputs.values()), strict=True)
            # Twice an image of one token: alone, Hugging Face drops its axis of tokens
            ones = (dict(zip(images.inputs, each, strict=True)) for each in parts)
            calls = [_twice(each) if kind.tokens(model.config, each, 1).item() == 1 else each for each in ones]
        found, *others = [model.get_image_features(**each, return_dict=True) for each in calls]
    if kind.is_masked:
        found.pooler_output = tuple(one.pooler_output[0] for one in (found, *others))

    def kept(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.flatten(0, -2)[images.features][None]
        return (torch.cat(tuple(each))[images.features],)

    found.pooler_output = kept(found.pooler_output)
    if getattr(found, "deepstack_features", None) is not None:
        found.deepstack_features = [kept(each) for each in found.deepstack_features]
    return found
