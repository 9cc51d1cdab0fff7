"""Activation checkpointing: backward computes layers again, for the microbatches whose plan says so.

Hugging Face's wrap of decoder layers is on for the forward of one microbatch, non-reentrant. The second run repeats the
ring's forward rounds right before its backward rounds, on all ranks alike. Chen et al. 2016 (arXiv 1604.06174);
DistFlashAttn (arXiv 2310.03294), section 3.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lengthwise.attention import ActivationPolicy, PlannedAttention, Recomputation
from lengthwise.core.errors import ModelRefused
from lengthwise.models.double import as_here
from lengthwise.models.dropout import KeyedDropout
from lengthwise.models.load import build_skeleton
from lengthwise.models.modules import modules_of

_REMEDY = "This model can only be trained with `recompute: none`."


def check_recompute(config: Any, kind: str) -> None:
    """Raise ModelRefused where the layers of a Hugging Face config have no wrap for recomputation."""
    if kind != "none" and not wrapped_layers(build_skeleton(config)):
        expected = "none, or a model with Hugging Face's gradient checkpointing"
        raise ModelRefused("recompute", expected=expected, got=f"{kind} with {config.model_type}", remedy=_REMEDY)


@contextlib.contextmanager
def apply_policy(
    model: nn.Module, planned: PlannedAttention, policy: ActivationPolicy, dropout: KeyedDropout | None = None
) -> Iterator[None]:
    """Save only the activations that `policy` names; backward recomputes the rest, with the same draws of `dropout`.

    Raises:
        ModelRefused: a layer of the model did not run through Hugging Face's wrap.
    """
    saving = nullcontext() if policy.saver is None else policy.saver.saving()
    with saving, dropout or nullcontext(), _recomputing(model, planned, policy, dropout):
        yield


@contextlib.contextmanager
def _recomputing(
    model: nn.Module, planned: PlannedAttention, policy: ActivationPolicy, dropout: KeyedDropout | None
) -> Iterator[None]:
    if policy.recompute == "none":
        yield
        return
    wrapped, precision = wrapped_layers(model), as_here()

    def run(forward: Callable[..., Any], *arguments: Any) -> Any:
        if not torch.is_grad_enabled():  # a forward that keeps nothing, as a loss may make for its metrics
            return forward(*arguments)
        layer = Recomputation(planned, keeps_attention=policy.recompute == "all_but_attention", saver=policy.saver)
        again = [] if dropout is None else [dropout.again()]  # from where this layer begins
        # torch ends a second run once all that was saved is there again. An attention saves after its ring is done,
        # so a ring is never left halfway.
        return checkpoint(
            forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,  # what is drawn has keys
            context_fn=lambda: (layer, _All(layer, precision, *again)),
        )

    if not all(module.training for module in wrapped):
        got = "one in evaluation mode, as from_pretrained leaves it: Hugging Face recomputes nothing in it"
        remedy = "Call model.train(), or train with `recompute: none`."
        expected = "a model in training mode, for recomputation"
        raise ModelRefused(f"model {type(model).__name__}", expected=expected, got=got, remedy=remedy)
    for module in wrapped:  # past a module's way of setting, which looks for parameters among what it is given
        vars(module).update(_gradient_checkpointing_func=run, gradient_checkpointing=True)
    try:
        yield
    finally:
        for module in wrapped:
            vars(module)["gradient_checkpointing"] = False
    if planned.layers_checkpointed != planned.layers_kept:
        where = f"model {type(model).__name__}"
        expected = f"all {planned.layers_kept} layers that mix tokens to run in Hugging Face's gradient checkpointing"
        raise ModelRefused(where, expected=expected, got=f"{planned.layers_checkpointed} that did", remedy=_REMEDY)


def wrapped_layers(model: nn.Module) -> list[Any]:
    """List the layers that Hugging Face wraps for checkpointing: the decoder's; none for families without the wrap."""
    return [module for module in modules_of(model) if isinstance(module, GradientCheckpointingLayer)]


class _All:
    """Blocks one inside the other, as ExitStack has them, which makes five times the calls."""

    def __init__(self, *blocks: AbstractContextManager[object]) -> None:
        self._blocks = blocks

    def __enter__(self) -> None:
        for each in self._blocks:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self._blocks):
            each.__exit__(*error)
