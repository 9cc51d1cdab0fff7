"""Activation checkpointing: backward recomputes layers, for the microbatches whose plan says so.

Hugging Face's wrap of decoder layers is used for the forward of one microbatch, non-reentrant. The recomputation
repeats the ring's forward rounds right before its backward rounds, on all ranks. Chen et al. 2016 (arXiv 1604.06174);
DistFlashAttn (arXiv 2310.03294), section 3.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lengthwise.attention import ActivationPolicy, PlannedAttention, Recomputation
from lengthwise.core.errors import ModelRefused
from lengthwise.core.names import counted
from lengthwise.core.plan import RECOMPUTED, Again, kinds_by_layer
from lengthwise.models.double import as_here
from lengthwise.models.modules import modules_of
from lengthwise.models.text_part import trained_towers, without_towers

_REMEDY = "This model can only be trained with `recompute: none`."


def check_recompute(model: Any, kind: str) -> None:
    """Raise ModelRefused if recomputation is asked for and the model's layers have no wrap for it."""
    if kind != "none" and not wrapped_layers(model):
        expected, got = (
            "none, or a model with Hugging Face's gradient checkpointing",
            f"{kind} with {model.config.model_type}",
        )
        raise ModelRefused("recompute", expected=expected, got=got, remedy=_REMEDY)


@contextlib.contextmanager
def apply_policy(
    model: nn.Module, planned: PlannedAttention, policy: ActivationPolicy, *, draws: bool = False
) -> Iterator[None]:
    """Save only the activations that `policy` names; backward recomputes the rest.

    draws: True if the forward draws random numbers, which the recomputation then draws again.

    Raises:
        ModelRefused: a layer did not run in Hugging Face's wrap.
    """
    saving = nullcontext() if policy.saver is None else policy.saver.saving()
    with saving, _recomputing(model, planned, policy, draws=draws):
        yield


@contextlib.contextmanager
def _recomputing(
    model: nn.Module, planned: PlannedAttention, policy: ActivationPolicy, *, draws: bool
) -> Iterator[None]:
    kinds = kinds_by_layer(policy.recompute)
    if kinds.stronger == "none":
        yield
        return
    wrapped, precision = wrapped_layers(model), as_here()
    of_towers = _wrapped(part for tower in trained_towers(model) for part in modules_of(tower))

    def run(again: Again | None, forward: Callable[..., Any], *arguments: Any, is_planned: bool = True) -> Any:
        if not torch.is_grad_enabled():  # a forward that saves nothing, such as a loss's for its metrics
            return forward(*arguments)
        if again is None:  # a layer that keeps everything, beside others
            before = planned.layers_kept
            out = forward(*arguments)
            planned.layers_checkpointed += planned.layers_kept - before
            return out
        layer = Recomputation(planned, again=again, saver=policy.saver) if is_planned else nullcontext()
        # torch stops a recomputation once everything saved is there. Attention saves after its ring, so no ring is
        # left halfway.
        return checkpoint(
            forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=draws,
            context_fn=lambda: (layer, _All(layer, precision)),
        )

    if not all(module.training for module in wrapped):
        got = "a model in evaluation mode, as from_pretrained returns it, in which Hugging Face recomputes nothing"
        remedy = "Call model.train(), or train with `recompute: none`."
        expected = "a model in training mode, for recomputation"
        raise ModelRefused(f"model {type(model).__name__}", expected=expected, got=got, remedy=remedy)
    of_layers = [(module, partial(run, RECOMPUTED[kinds.of(layer)])) for layer, module in enumerate(wrapped)]
    of_layers += [(module, partial(run, RECOMPUTED[kinds.stronger], is_planned=False)) for module in of_towers]
    for module, function in of_layers:  # vars: faster than a module's __setattr__, which looks for parameters
        vars(module).update(_gradient_checkpointing_func=function, gradient_checkpointing=True)
    try:
        yield
    finally:
        for module, _ in of_layers:
            vars(module)["gradient_checkpointing"] = False
    if planned.layers_checkpointed != planned.layers_kept:
        where = f"model {type(model).__name__}"
        expected = f"all {planned.layers_kept} layers that mix tokens to run in Hugging Face's gradient checkpointing"
        raise ModelRefused(where, expected=expected, got=counted(planned.layers_checkpointed, "layer"), remedy=_REMEDY)


def wrapped_layers(model: nn.Module) -> list[Any]:
    """List the decoder layers that Hugging Face wraps for checkpointing; some families have no wrap."""
    return _wrapped(modules_of(without_towers(model)))


def _wrapped(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


class _All:
    """Nested context managers; ExitStack makes five times the calls."""

    def __init__(self, *blocks: AbstractContextManager[object]) -> None:
        self._blocks = blocks

    def __enter__(self) -> None:
        for each in self._blocks:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self._blocks):
            each.__exit__(*error)
