"""Layers of Hugging Face models that mix tokens without attention, run by a plan.

Transformers computes every gated delta rule, KDA, Mamba 2 and short convolution by a function of the modeling file, and
passes it the keyword arguments of `forward`, so the plan arrives there as in attention. Each function is replaced by
one that runs the plan if it gets one, and the original otherwise. A planned forward that calls a function without the
plan is refused, because it would mix documents of a pack. Kernels (`mixer_kernels`) compute the spans of a plan.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import dedent
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.attention import Opened, PlannedAttention, convolve_spans, scan_spans
from lengthwise.core.errors import ModelRefused
from lengthwise.core.trained import MIXERS_OF
from lengthwise.models.mixer_kernels import (
    CONVOLUTION,
    DELTA_RULE,
    KDA,
    MAMBA2,
    MixerKernel,
    Tokens,
    plain_kernel,
    spans_in,
)
from lengthwise.models.modules import modules_of
from lengthwise.program import Mixing

Kernels = Mapping[tuple[str, torch.dtype], MixerKernel]
"""Kernels in place of transformers' functions, by function and dtype of the tokens."""


def count_mixers(config: Any, layers: Sequence[int] | None = None) -> int:
    """Count the layers that mix tokens in a model, or in some decoder layers, which may have two or none."""
    kinds = list(getattr(config, "layer_types", None) or ())
    if not kinds:
        return config.num_hidden_layers if layers is None else len(layers)
    return sum(MIXERS_OF.get(kinds[number], 1) for number in (range(len(kinds)) if layers is None else layers))


def has_states(config: Any) -> bool:
    """Return whether a layer has a state that runs through the whole sequence."""
    return any(kind in ("linear_attention", "hybrid") for kind in getattr(config, "layer_types", None) or ())


def mixing_of(model: nn.Module) -> Mixing:
    """Return the states and halos that a model passes along sequences."""
    files = {module for module in _modeling_files(model) if any(hasattr(module, name) for name in _PLANNED)}
    if not files:
        return Mixing()
    widths = [module.kernel_size[0] for module in modules_of(model) if isinstance(module, nn.Conv1d)]
    return Mixing(
        has_states=any(hasattr(module, name) for module in files for name in _SCANS), width=max(widths, default=1)
    )


class DeltaRule:
    """Gated delta rule and KDA: S_t = (I - beta k k') exp(g) S_(t-1) + beta k v', a state (heads, key, value) per span.

    Columns of a state do not mix. So the same function on values widened by zeros, from a state widened by I, returns
    (outputs from zero | the reader of a state before the span), and (b | a) as the last state.
    """

    is_matrix = True

    def __init__(self, kernel: MixerKernel, **how: Any) -> None:
        self._kernel, self._how = kernel, how

    def run(
        self, tokens: Tokens, lengths: Sequence[int], *, before: Tensor | None, states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of whole sequences, and the states after them (see `Scan`)."""
        return self._kernel.run(tokens, lengths, before=before, states=states, **self._how)

    def open(self, tokens: Tokens, lengths: Sequence[int]) -> Opened:
        """Run spans from a state of zero (see `Scan`)."""
        values, key = tokens["value"], tokens["key"].shape[-1]
        heads, sizes = values.shape[2], [values.shape[-1], key]
        wide = torch.promote_types(values.dtype, torch.float32)
        unit = torch.eye(key, dtype=wide, device=values.device).expand(1, heads, -1, -1)
        start, widened = F.pad(unit, (sizes[0], 0)), F.pad(values, (0, key))
        outs, ends = widened, iter(())
        if held := [length for length in lengths if length]:
            tokens = {**tokens, "value": widened}
            before = start.expand(len(held), -1, -1, -1)
            outs, states = self._kernel.run(tokens, held, before=before, states=True, **self._how)
            ends = iter(states.to(wide).split(1))
        last = torch.cat([next(ends) if length else start for length in lengths])
        (out, reader), (b, a) = outs.split(sizes, -1), last.split(sizes, -1)
        return Opened(out=out, reader=reader, a=a, b=b)

    def read(self, reader: Tensor, state: Tensor) -> Tensor:
        """Return what a state before a span adds to its outputs."""
        return torch.einsum("bthk,bhkv->bthv", reader, state)


class Mamba2:
    """Mamba 2: S_t = exp(dt A) S_(t-1) + dt x B', a state (heads, head_dim, n) a span; A is one number a head."""

    is_matrix = False

    def __init__(self, kernel: MixerKernel, decay: Tensor, **how: Any) -> None:
        self._kernel, self._decay, self._how = kernel, decay, how

    def run(
        self, tokens: Tokens, lengths: Sequence[int], *, before: Tensor | None, states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of whole sequences, and the states after them (see `Scan`)."""
        return self._kernel.run(tokens, lengths, before=before, states=states, A=self._decay, **self._how)

    def open(self, tokens: Tokens, lengths: Sequence[int]) -> Opened:
        """Run spans from a state of zero (see `Scan`)."""
        hidden, heads = tokens["hidden_states"], tokens["hidden_states"].shape[2]
        outs, ends = hidden, iter(())
        if held := [length for length in lengths if length]:
            outs, states = self._kernel.run(tokens, held, before=None, states=True, A=self._decay, **self._how)
            ends = iter(states.split(1))
        readers, factors, lasts = [], [], []
        for each in spans_in(tokens, lengths):
            reading = each["C"]
            decay = (self._step(each["dt"]).float() * self._decay.float()).cumsum(1)  # (1, rows, heads)
            none = decay.new_zeros(1, *hidden.shape[2:], reading.shape[-1])
            lasts.append(next(ends).to(decay.dtype) if reading.shape[1] else none)
            readers.append(reading.float().repeat_interleave(heads // reading.shape[2], 2) * decay.exp()[..., None])
            factors.append(decay[:, -1:].sum(1).exp()[..., None, None])
        return Opened(out=outs, reader=torch.cat(readers, dim=1), a=torch.cat(factors), b=torch.cat(lasts))

    def read(self, reader: Tensor, state: Tensor) -> Tensor:
        """Return what a state before a span adds to its outputs."""
        return torch.einsum("bthn,bhpn->bthp", reader, state)

    def _step(self, step: Tensor) -> Tensor:
        bias = self._how.get("dt_bias")
        step = step.float() if self._kernel.steps_in_fp32 else step
        step = step if bias is None else step + bias.to(step.dtype)
        step = F.softplus(step) if self._how.get("dt_softplus") else step
        return step.clamp(*self._how.get("dt_limit", (0.0, float("inf"))))


def _run_delta_rule(
    kernel: MixerKernel,
    planned: PlannedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **asked: Any,
) -> tuple[Tensor, None]:
    scan = DeltaRule(kernel, **_taken(asked, "use_qk_l2norm_in_kernel"))
    tokens = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    return scan_spans(planned.local_spans, tokens, scan), None


def _run_mamba2(
    kernel: MixerKernel,
    planned: PlannedAttention,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - the names that transformers has
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    **asked: Any,
) -> Tensor:
    scan = Mamba2(kernel, A, **_taken(asked, "chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit"))
    return scan_spans(planned.local_spans, {"hidden_states": hidden_states, "dt": dt, "B": B, "C": C}, scan)


def _run_convolution(
    kernel: MixerKernel,
    planned: PlannedAttention,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **asked: Any,
) -> Tensor:
    """Convolve (1, channels, rows), each channel by itself, with a weight (channels, width)."""
    how = _taken(asked, "activation")

    def convolve(rows: Tensor) -> Tensor:
        return kernel.run(rows.t()[None], weight, bias, **how)[0].t()

    rows = hidden_states[0].t()
    return convolve_spans(planned.local_spans, rows, planned.halo(weight.shape[-1]), convolve).t()[None]


def _taken(asked: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the arguments of these names; the others are for kernels that separate packs by themselves."""
    refused = [name for name in _REFUSED if asked.get(name) is not None and asked[name] is not False]
    assert not refused, f"expected no state of a cache and no gate inside a scan, got {refused}"
    return {name: asked[name] for name in names if name in asked}


_SCANS: dict[str, Callable[..., Any]] = {
    DELTA_RULE: _run_delta_rule,
    KDA: _run_delta_rule,
    MAMBA2: _run_mamba2,
}
_PLANNED = {**_SCANS, CONVOLUTION: _run_convolution}
_REFUSED = ("initial_state", "output_final_state", "initial_states", "return_final_states", "z")
_OTHERS = ("mamba_selective_scan",)  # a state a channel and entry, and a function without forward's arguments
_FUSED = "mamba2_split_conv1d_scan_combined"  # a whole Mamba 2 layer in one kernel, or None: the layer does its parts
_seen: WeakSet[nn.Module] = WeakSet()
_kernels: WeakKeyDictionary[nn.Module, Kernels] = WeakKeyDictionary()


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Register these kernels, beside a model's others for other functions and dtypes."""
    _kernels[model] = {**_kernels.get(model, {}), **kernels}


def mixers_in(model: nn.Module) -> list[str]:
    """List transformers' functions by which a model mixes tokens without attention."""
    files = _modeling_files(model)
    return [name for name in _PLANNED if any(hasattr(module, name) for module in files)]


def plain_function(model: nn.Module, name: str) -> Callable[..., Any]:
    """Return transformers' function of this name, in plain torch, where the layers of a model find it."""
    return _in_torch(next(getattr(module, name) for module in _modeling_files(model) if hasattr(module, name)))


def _in_torch(function: Any) -> Callable[..., Any]:
    return inspect.unwrap(function.function if isinstance(function, _ByPlan | _InParts) else function)


def put_mixers(model: nn.Module, is_planned: Callable[[], bool]) -> Kernels:
    """Make the layers of a model that mix tokens without attention run by the plan among `forward`'s arguments.

    is_planned: function that returns whether this thread runs a forward by a plan. Returns the model's kernels.

    Raises:
        ModelRefused: layers that Hugging Face replaced by kernels of its hub.
    """
    if model in _seen:
        return _kernels.get(model, {})
    for module in _modeling_files(model):
        found = [name for name in _PLANNED if hasattr(module, name)]
        if found and getattr(model, "use_kernels", False):
            expected, got = "layers of Transformers, which a plan can run", "kernels of the hub (use_kernels)"
            remedy = "Load the model without use_kernels."
            raise ModelRefused(f"model {type(model).__name__}", expected=expected, got=got, remedy=remedy)
        for name in found:
            if not isinstance(getattr(module, name), _ByPlan):
                setattr(module, name, _ByPlan(module, name, is_planned))
        if hasattr(module, _FUSED) and not isinstance(getattr(module, _FUSED), _InParts):
            setattr(module, _FUSED, _InParts(getattr(module, _FUSED), is_planned))
    _seen.add(model)
    return _kernels.get(model, {})


@contextmanager
def mixing_in_torch(model: nn.Module) -> Iterator[None]:
    """Make the layers of a model mix tokens by transformers' own functions in plain torch inside the block.

    Where a package is installed, transformers takes its functions in every dtype and on every device; they compute in
    less than fp32, on GPUs alone, and some releases not at all there.
    """
    found = [(file, name) for file in _modeling_files(model) for name in (*_PLANNED, _FUSED) if hasattr(file, name)]
    before = [getattr(*each) for each in found]
    for each, function in zip(found, before, strict=True):
        setattr(*each, _in_torch(function))
    try:
        yield
    finally:
        for each, function in zip(found, before, strict=True):
            setattr(*each, function)


def runs_by_plan(kind: type[nn.Module]) -> bool:
    """Return whether layers of a class of transformers pass the plan to their mixing functions."""
    calls = [node for node in ast.walk(ast.parse(dedent(inspect.getsource(kind)))) if isinstance(node, ast.Call)]
    mixing = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in (*_PLANNED, *_OTHERS)]
    return any(mixing) and all(
        node.func.id in _PLANNED and any(each.arg is None for each in node.keywords)  # type: ignore[union-attr]
        for node in mixing
    )


def _modeling_files(model: nn.Module) -> set[Any]:
    names = {kind.__module__ for kind in {type(module) for module in modules_of(model)}}
    return {sys.modules[name] for name in names if name.startswith("transformers.models.")}


class _ByPlan:
    """A function of a modeling file that runs the plan where it is given."""

    def __init__(self, module: Any, name: str, is_planned: Callable[[], bool]) -> None:
        self._name, self.function, self._is_planned = name, getattr(module, name), is_planned
        # Transformers takes a package's function where there is one, on any device; this is its own.
        self._plain = plain_kernel(name, inspect.unwrap(self.function))
        self._counts = name in _SCANS or not any(hasattr(module, each) for each in _SCANS)  # else the scan after it
        self._planned: Callable[..., Any] = torch.compiler.disable(self._run)

    def _run(self, planned: PlannedAttention, tokens: Tensor, *args: Any, **asked: Any) -> Any:
        if self._counts:
            planned.count_layer()
        kernel = planned.mixers.get((self._name, tokens.dtype), self._plain)
        return _PLANNED[self._name](kernel, planned, tokens, *args, **asked)

    def __call__(self, *args: Any, lengthwise: PlannedAttention | None = None, **asked: Any) -> Any:
        if lengthwise is not None:
            return self._planned(lengthwise, *args, **asked)
        if self._is_planned():
            expected, remedy = "the plan among its arguments", "This layer would mix documents; use another model."
            raise ModelRefused(self._name, expected=expected, got="a call without it", remedy=remedy)
        return self.function(*args, **asked)


class _InParts:
    """A function for a whole layer, replaced in planned forwards by the functions of its parts."""

    def __init__(self, function: Callable[..., Any], is_planned: Callable[[], bool]) -> None:
        self.function, self._is_planned = function, is_planned

    def __call__(self, *args: Any, **asked: Any) -> Any:
        return None if self._is_planned() else self.function(*args, **asked)
