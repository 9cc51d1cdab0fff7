"""How a model computes, chosen once for a run or a session; training, `verify`, profiles and memory use the same.

These settings change speed and memory, and results only by rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lengthwise.attention import AttentionNeeds, BlockKernel, check_attention, choose_kernel
from lengthwise.comm import Transport
from lengthwise.config import TrainingSettings
from lengthwise.core.packages import installed_version
from lengthwise.models.adapter import leave_attention_eager
from lengthwise.models.checkpointing import wrapped_layers
from lengthwise.models.experts import choose_experts, expert_weights, needs_of, taking_experts
from lengthwise.models.families import attention_heads, has_windows, largest_head_dim, score_cap
from lengthwise.models.fused_layers import (
    Forwards,
    FusedNeeds,
    choose_forwards,
    choose_fused,
)
from lengthwise.models.model_source import build_skeleton
from lengthwise.models.modules import modules_of
from lengthwise.models.text_part import text_config, without_towers

_MOST_VARIANTS = 32  # compiled variants of one function (windows, training, one row); torch's default is 8
# Hugging Face wraps a layer's forward since transformers 5.2x, and its call before.
_WRAPS_FORWARD = "__init_subclass__" in vars(GradientCheckpointingLayer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """The settings of run files and sessions with these names, and their defaults."""

    attention: str = "auto"
    compile: bool = False
    fused_layers: str = "auto"
    experts: str = "auto"

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self:
        """Read them from settings."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


def check_computing(config: Any, computing: Computing, *, dtype: torch.dtype, on_gpus: bool) -> None:
    """Check that a model of this config can compute with these settings, before any process starts.

    Raises:
        ConfigError: it cannot.
    """
    check_attention(computing.attention, attention_needs(config, dtype), on_gpus=on_gpus)
    choose_fused(computing.fused_layers, _fused_needs(config, computing, dtype=dtype, on_gpu=on_gpus))
    if computing.experts != "auto":
        choose_experts(computing.experts, needs_of(build_skeleton(config), dtype, on_gpu=on_gpus, capability=None))


def choose_model_kernel(
    config: Any,
    computing: Computing,
    device: torch.device,
    *,
    dtype: torch.dtype,
    say: Callable[[str], None] | None = None,
    transport: Transport | None = None,
) -> BlockKernel:
    """Choose the attention kernel of a model on `device`, with arguments and errors of `choose_kernel`."""
    needs = attention_needs(config, dtype)
    return choose_kernel(device, needs, implementation=computing.attention, say=say, transport=transport)


def attention_needs(config: Any, dtype: torch.dtype) -> AttentionNeeds:
    """Return a model's needs of its attention kernel, by its config; one kernel serves all layers."""
    heads, kv_heads = attention_heads(config)
    return AttentionNeeds(
        dtype=dtype,
        head_dim=largest_head_dim(config),
        windowed=has_windows(config),
        capped=score_cap(config) is not None,
        heads=heads,
        kv_heads=kv_heads,
    )


# What a user's calls set on a module (`Module.compile`, `gradient_checkpointing_enable`), and the value without them.
# torch cannot trace rings, and a plan recomputes by itself.
_NOT_BY_PLAN = {"_compiled_call_impl": None, "gradient_checkpointing": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The chosen layers of a model, except attention. experts: transformers' implementation, None to keep it.

    modules: modules of the model, whose own `compile` and gradient checkpointing planned passes do not use.
    """

    model: Any
    forwards: Forwards
    experts: str | None
    modules: Sequence[nn.Module] = ()

    def kept(self) -> Layers:
        """Return the layers that the model still has, after it was reduced to a stage."""
        modules = set(self.model.modules())
        return replace(self, forwards={each: forward for each, forward in self.forwards.items() if each in modules})

    def put(self) -> None:
        """Put the forwards into the model; forwards that the user has set on modules stay."""
        if self.experts is not None:
            taking_experts(self.model).set_experts_implementation(self.experts)
        for module, forward in self.forwards.items():
            vars(module).setdefault("forward", forward)

    @contextmanager
    def put_inside(self) -> Iterator[None]:
        """Put the forwards into the model inside the block."""
        experts: Any = None if self.experts is None else taking_experts(self.model).config
        before = None if experts is None else experts._experts_implementation
        aside = [
            (vars(module), key, value, vars(module)[key])
            for module in self.modules
            for key, value in _NOT_BY_PLAN.items()
            if vars(module).get(key, value) is not value
        ]
        for own, key, value, _ in aside:
            own[key] = value
        self.put()
        try:
            yield
        finally:
            for own, key, _, value in aside:
                own[key] = value
            for module, forward in self.forwards.items():
                if vars(module).get("forward") is forward:
                    del module.forward  # the class's forward is left
            if experts is not None:
                experts._experts_implementation = before


def choose_layers(
    model: Any,
    computing: Computing,
    device: torch.device,
    transport: Transport | None = None,
    *,
    dtype: torch.dtype,
    say: Callable[[str], None] | None = None,
    wrap: nn.Module | None = None,
) -> Layers:
    """Choose how a model's layers compute on `device` in `dtype`. Collective on GPUs.

    transport: of all ranks; if None, this rank chooses alone. say: called with each choice and its reason. wrap: a
    module around the model, such as peft's.

    Raises:
        ConfigError: layers or experts cannot compute on this device as asked.
    """
    model = without_towers(model)  # towers compute as in Hugging Face
    report, on_gpu = say or (lambda _: None), device.type == "cuda"
    experts, forwards = None, dict[nn.Module, Callable[..., Any]]()
    if expert_weights(model):
        capability = torch.cuda.get_device_capability(device) if on_gpu else None
        needs = needs_of(model, dtype, on_gpu=on_gpu, capability=capability)
        implementation, reason = choose_experts(computing.experts, needs)
        experts = implementation if needs.replaceable else None
        report(f"experts: {implementation}; because {reason}")
    fused = _fused_needs(model.config, computing, dtype=dtype, on_gpu=on_gpu)
    forwards, done = choose_forwards(model, computing.fused_layers, fused, device, transport)
    if forwards or on_gpu:  # the CPU has none
        report(f"fused layers: {done}")
    if computing.compile:
        forwards, done = compiled_forwards(model)
        report(f"compile: {done}")
    every = dict.fromkeys((*modules_of(model), *(() if wrap is None else modules_of(wrap))))
    if any(vars(each).get("_compiled_call_impl") is not None for each in every):
        report("planned steps do not use what model.compile() has compiled: give compile=True to compile around plans")
    modules = [each for each in every if each._modules]  # others have no attention inside
    return Layers(model=model, forwards=forwards, experts=experts, modules=modules)


def _fused_needs(config: Any, computing: Computing, *, dtype: torch.dtype, on_gpu: bool) -> FusedNeeds:
    return FusedNeeds(
        family=text_config(config).model_type,
        dtype=dtype,
        on_gpu=on_gpu,
        compiled=computing.compile,
        liger=installed_version("liger-kernel"),
    )


def allow_variants() -> None:
    """Let torch compile more variants of a function than by default; above its limit it silently runs the function."""
    torch._dynamo.config.recompile_limit = max(_MOST_VARIANTS, torch._dynamo.config.recompile_limit)


def compiled_forwards(model: Any, *, backend: str = "inductor") -> tuple[Forwards, str]:
    """Return compiled forwards of a model's decoder layers, and a note on them, or on the reason for none."""
    layers = [layer for layer in wrapped_layers(model) if "forward" not in vars(layer)]  # not the user's forwards
    if not layers:
        return {}, "no layer is compiled: this family has no wrap around its layers"
    if expert_weights(model):  # an expert's tokens depend on data: a graph break per expert
        return {}, "no layer is compiled: experts are not traced yet"
    allow_variants()
    # Tracing reads the gradient of every input, and warns of that.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    leave_attention_eager()
    compiled = {kind: torch.compile(_own_forward(kind), dynamic=True, backend=backend) for kind in map(type, layers)}
    forwards = dict[nn.Module, Callable[..., Any]]()
    for layer in layers:
        run = partial(compiled[type(layer)], layer)
        # Partial functions, not closures, so that a copy of the model runs its own layers.
        forwards[layer] = partial(_run_wrapped, layer, run) if _WRAPS_FORWARD else run
    return forwards, f"{len(layers)} layers are compiled around their attention, when a class of shapes first occurs"


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    forward: Any = kind.forward
    return forward.__wrapped__ if _WRAPS_FORWARD else forward


def _run_wrapped(layer: Any, run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Do the work of Hugging Face's wrap, which the forward on the instance hides."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(run, **keywords), *arguments)
    return run(*arguments, **keywords)
