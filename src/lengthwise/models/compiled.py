"""`torch.compile` of decoder layers, with their attention left as it is: rings and packs are no graph.

The layer's own forward is compiled, inside of Hugging Face's wrap for checkpointing; attention breaks it in two graphs.
Token counts are symbols, one row a class of its own. Some seconds a graph, once a process; docs/decisions/compiled-
layers.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lengthwise.models.adapter import leave_attention_eager
from lengthwise.models.checkpointing import wrapped_layers
from lengthwise.models.experts import experts_of

_MOST_VARIANTS = 32  # of one function: windows, training or not, one row; torch would stop compiling after 8
# Hugging Face wraps a layer's forward since transformers 5.2x, and its call before.
_WRAPS_FORWARD = "__init_subclass__" in vars(GradientCheckpointingLayer)


def compile_layers(model: Any, *, backend: str = "inductor") -> str:
    """Compile the decoder layers of a model in place; return what was done, or why it was not."""
    layers = wrapped_layers(model)
    if not layers:
        return "no layer is compiled: this family has no wrap around its layers"
    if experts_of(model):  # whose tokens an expert gets is data: a break for each expert
        return "no layer is compiled: experts are not traced yet"
    torch._dynamo.config.recompile_limit = max(_MOST_VARIANTS, torch._dynamo.config.recompile_limit)
    # Tracing asks every input for its gradient, and warns of its own question.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    leave_attention_eager()
    compiled = {kind: torch.compile(_own_forward(kind), dynamic=True, backend=backend) for kind in map(type, layers)}
    for layer in layers:
        run = partial(compiled[type(layer)], layer)
        # Partial functions, not closures: a copy of the model then runs its own layers.
        layer.forward = partial(_run_wrapped, layer, run) if _WRAPS_FORWARD else run
    return f"{len(layers)} layers are compiled around their attention, each shape class when it first comes"


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    forward: Any = kind.forward
    return forward.__wrapped__ if _WRAPS_FORWARD else forward


def _run_wrapped(layer: Any, run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Do what Hugging Face's wrap does; the forward on the instance hides it."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(run, **keywords), *arguments)
    return run(*arguments, **keywords)
