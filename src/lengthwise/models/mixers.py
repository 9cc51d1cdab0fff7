"""Layers of Hugging Face models that mix tokens without attention, run by a plan.

Transformers computes every gated delta rule, KDA, Mamba 2 and short convolution by a function of the modeling file, and
hands it the keyword arguments of `forward`: the plan arrives there as it does in attention. The function is replaced by
one that runs the plan where it is given, and is itself everywhere else. A function that a planned forward calls without
the plan is refused: it would mix documents of a pack.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from textwrap import dedent
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.attention import Opened, PlannedAttention, convolve_spans, scan_spans, to_device
from lengthwise.core.errors import ModelRefused
from lengthwise.core.trained import MIXERS_OF
from lengthwise.program import Mixing

Tokens = Mapping[str, Tensor]


def count_mixers(config: Any, layers: Sequence[int] | None = None) -> int:
    """Count the layers that mix tokens, of a model or of some of its decoder layers: some have two, some none."""
    kinds = list(getattr(config, "layer_types", None) or ())
    if not kinds:
        return config.num_hidden_layers if layers is None else len(layers)
    return sum(MIXERS_OF.get(kinds[number], 1) for number in (range(len(kinds)) if layers is None else layers))


def has_states(config: Any) -> bool:
    """Return whether some layer has a state that runs through the whole sequence."""
    return any(kind in ("linear_attention", "hybrid") for kind in getattr(config, "layer_types", None) or ())


def mixing_of(model: nn.Module) -> Mixing:
    """Return what a model passes along sequences beside keys."""
    files = {module for module in _modeling_files(model) if any(hasattr(module, name) for name in _PLANNED)}
    if not files:
        return Mixing()
    widths = [module.kernel_size[0] for module in model.modules() if isinstance(module, nn.Conv1d)]
    return Mixing(
        has_states=any(hasattr(module, name) for module in files for name in _SCANS), width=max(widths, default=1)
    )


class DeltaRule:
    """Gated delta rule and KDA: S_t = (I - beta k k') exp(g) S_(t-1) + beta k v', a state (heads, key, value) a span.

    Columns of a state do not mix. So the same function on values widened by zeros, from a state widened by I, gives
    (outputs from zero | what reads a state before the span), and (b | a) as the last state.
    """

    is_matrix = True

    def __init__(self, function: Callable[..., Any], value: Tensor, key: Tensor, **how: Any) -> None:
        self._function, self._how, self._packs = function, how, _has_kernel("fla", value.device)
        self._heads, self._key, self._value = value.shape[2], key.shape[-1], value.shape[-1]

    def run(self, tokens: Tokens, lengths: Sequence[int]) -> Tensor:
        """Return the outputs of whole documents: one call where a kernel keeps them apart, else one a document."""
        if self._packs:
            return self._call(tokens, **_borders(lengths, tokens["value"].device))[0]
        return torch.cat([self._call(each)[0] for each in _spans(tokens, lengths)], dim=1)

    def open(self, tokens: Tokens, lengths: Sequence[int]) -> Opened:
        """Run spans from a state of zero, and give their maps."""
        values, sizes = tokens["value"], [self._value, self._key]
        wide = torch.promote_types(values.dtype, torch.float32)
        unit = torch.eye(self._key, dtype=wide, device=values.device).expand(1, self._heads, -1, -1)
        start = F.pad(unit, (self._value, 0))
        tokens, states = {**tokens, "value": F.pad(values, (0, self._key))}, [start] * len(lengths)
        full = [number for number, length in enumerate(lengths) if length]
        out, more = tokens["value"], {"output_final_state": True}
        if full and self._packs:
            borders = _borders([lengths[number] for number in full], values.device)
            out, last = self._call(tokens, initial_state=start.repeat(len(full), 1, 1, 1), **more, **borders)
            found = last.split(1)
        elif full:
            spans = [*_spans(tokens, lengths)]
            outs, found = zip(*(self._call(spans[n], initial_state=start, **more) for n in full), strict=True)
            out = torch.cat(outs, dim=1)
        else:
            found = ()
        for number, state in zip(full, found, strict=True):
            states[number] = state.to(wide)
        (out, reader), (b, a) = out.split(sizes, -1), torch.cat(states).split(sizes, -1)
        return Opened(out=out, reader=reader, a=a, b=b)

    def _call(self, x: Tokens, **more: Any) -> Any:
        # By place, as transformers calls it: kernels of packages have other names.
        return self._function(x["query"], x["key"], x["value"], g=x["g"], beta=x["beta"], **self._how, **more)

    def read(self, reader: Tensor, state: Tensor) -> Tensor:
        """Return what a state before a span adds to its outputs."""
        return torch.einsum("bthk,bhkv->bthv", reader, state)


class Mamba2:
    """Mamba 2: S_t = exp(dt A) S_(t-1) + dt x B', a state (heads, head_dim, n) a span; A is one number a head."""

    is_matrix = False

    def __init__(self, function: Callable[..., Any], decay: Tensor, **how: Any) -> None:
        self._function, self._decay, self._how = function, decay, how

    def run(self, tokens: Tokens, lengths: Sequence[int]) -> Tensor:
        """Return the outputs of whole documents: one call where a kernel keeps them apart, else one a document."""
        if _has_kernel("mamba_ssm", self._decay.device):
            documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([*lengths]))
            return self._call(tokens, seq_idx=to_device(documents.int()[None], self._decay.device))
        return torch.cat([self._call(each) for each in _spans(tokens, lengths)], dim=1)

    def open(self, tokens: Tokens, lengths: Sequence[int]) -> Opened:
        """Run spans from a state of zero, and give their maps."""
        outs, readers, factors, lasts = [], [], [], []
        for each in _spans(tokens, lengths):
            hidden, reading = each["hidden_states"], each["C"]
            decay = (self._step(each["dt"]).float() * self._decay.float()).cumsum(1)  # (1, rows, heads)
            heads = hidden.shape[2]
            out, last = hidden, decay.new_zeros(1, *hidden.shape[2:], reading.shape[-1])
            if hidden.shape[1]:
                out, last = self._call(each, return_final_states=True)
            outs.append(out)
            lasts.append(last.to(decay.dtype))
            readers.append(reading.float().repeat_interleave(heads // reading.shape[2], 2) * decay.exp()[..., None])
            factors.append(decay[:, -1:].sum(1).exp()[..., None, None])
        return Opened(
            out=torch.cat(outs, dim=1), reader=torch.cat(readers, dim=1), a=torch.cat(factors), b=torch.cat(lasts)
        )

    def read(self, reader: Tensor, state: Tensor) -> Tensor:
        """Return what a state before a span adds to its outputs."""
        return torch.einsum("bthn,bhpn->bthp", reader, state)

    def _call(self, x: Tokens, **more: Any) -> Any:
        return self._function(x["hidden_states"], x["dt"], self._decay, x["B"], x["C"], **self._how, **more)

    def _step(self, step: Tensor) -> Tensor:
        """Return dt as the function uses it."""
        bias = self._how.get("dt_bias")
        step = step if bias is None else step + bias.to(step.dtype)
        step = F.softplus(step) if self._how.get("dt_softplus") else step
        return step.clamp(*self._how.get("dt_limit", (0.0, float("inf"))))


def _spans(tokens: Tokens, lengths: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Yield what a scan reads of each span."""
    parts = {name: x.split([*lengths], dim=1) for name, x in tokens.items()}
    for number in range(len(lengths)):
        yield {name: each[number] for name, each in parts.items()}


def _has_kernel(package: str, device: torch.device) -> bool:
    """Return whether transformers computes by a package on `device`, which then takes many documents in one call."""
    return device.type == "cuda" and is_found(package)


def is_found(package: str) -> bool:
    """Return whether Python finds a package, without an import."""
    return find_spec(package) is not None


def _borders(lengths: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return where documents begin and end, as fla takes them; on the host too, or it would wait for the device."""
    borders = torch.tensor([0, *accumulate(lengths)])
    return {"cu_seqlens": to_device(borders, device), "cu_seqlens_cpu": borders}


def _run_delta_rule(
    function: Callable[..., Any],
    planned: PlannedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **asked: Any,
) -> tuple[Tensor, None]:
    assert initial_state is None, "a plan begins every sequence anew"
    assert not output_final_state, "a plan keeps no state for later calls"
    scan = DeltaRule(function, value, key, **_taken(asked, "use_qk_l2norm_in_kernel"))
    planned.count_layer()
    tokens = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    return scan_spans(planned.local_spans, tokens, scan), None


def _run_mamba2(
    function: Callable[..., Any],
    planned: PlannedAttention,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - the names that transformers has
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    z: Tensor | None = None,
    **asked: Any,
) -> Tensor:
    assert initial_states is None, "a plan begins every sequence anew"
    assert not return_final_states, "a plan keeps no state for later calls"
    assert z is None, "a gate inside of the scan"
    scan = Mamba2(function, A, **_taken(asked, "chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit"))
    planned.count_layer()
    return scan_spans(planned.local_spans, {"hidden_states": hidden_states, "dt": dt, "B": B, "C": C}, scan)


def _run_convolution(
    function: Callable[..., Any],
    planned: PlannedAttention,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **asked: Any,
) -> Tensor:
    """Convolve (1, channels, rows), each channel by itself, with a weight (channels, width)."""
    if not any(hasattr(sys.modules[function.__module__], name) for name in _SCANS):  # else the scan after it counts
        planned.count_layer()
    how = _taken(asked, "activation")

    def convolve(rows: Tensor) -> Tensor:
        return function(rows.t()[None], weight, bias, **how)[0].t()

    rows = hidden_states[0].t()
    return convolve_spans(planned.local_spans, rows, planned.halo(weight.shape[-1]), convolve).t()[None]


def _taken(asked: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the arguments of these names; the others are for kernels that keep packs apart by themselves."""
    return {name: asked[name] for name in names if name in asked}


_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _run_delta_rule,
    "chunk_kimi_delta_attention": _run_delta_rule,
    "mamba2_chunk_scan": _run_mamba2,
}
_PLANNED = {**_SCANS, "causal_conv1d_fn": _run_convolution}
_OTHERS = ("mamba_selective_scan",)  # a state a channel and entry, and a function without forward's arguments
_FUSED = "mamba2_split_conv1d_scan_combined"  # a whole Mamba 2 layer in one kernel, or None: the layer does its parts
_seen: WeakSet[nn.Module] = WeakSet()


def put_mixers(model: nn.Module, is_planned: Callable[[], bool]) -> None:
    """Let the layers of a model that mix tokens without attention run by the plan that `forward` is given.

    is_planned: whether this thread runs a forward by a plan.

    Raises:
        ModelRefused: layers that Hugging Face replaced by kernels of its hub.
    """
    if model in _seen:
        return
    for module in _modeling_files(model):
        found = [name for name in _PLANNED if hasattr(module, name)]
        if found and getattr(model, "use_kernels", False):
            expected, got = "layers of Transformers, which a plan can run", "kernels of the hub (use_kernels)"
            remedy = "Load the model without use_kernels."
            raise ModelRefused(f"model {type(model).__name__}", expected=expected, got=got, remedy=remedy)
        for name in found:
            function = getattr(module, name)
            if not isinstance(function, _ByPlan):
                setattr(module, name, _ByPlan(function, _PLANNED[name], is_planned))
        if hasattr(module, _FUSED) and not isinstance(getattr(module, _FUSED), _InParts):
            setattr(module, _FUSED, _InParts(getattr(module, _FUSED), is_planned))
    _seen.add(model)


def runs_by_plan(kind: type[nn.Module]) -> bool:
    """Return whether layers of a class of transformers hand the plan to what they mix tokens by."""
    calls = [node for node in ast.walk(ast.parse(dedent(inspect.getsource(kind)))) if isinstance(node, ast.Call)]
    mixing = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in (*_PLANNED, *_OTHERS)]
    return any(mixing) and all(
        node.func.id in _PLANNED and any(each.arg is None for each in node.keywords)  # type: ignore[union-attr]
        for node in mixing
    )


def mixing_functions(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the functions of transformers by which layers of a model mix tokens without attention, by name."""
    files = [vars(module) for module in _modeling_files(model)]
    found = {name: file[name] for file in files for name in _PLANNED if name in file}
    return {name: each.function if isinstance(each, _ByPlan) else each for name, each in found.items()}


def _modeling_files(model: nn.Module) -> set[Any]:
    """Return the modules of transformers in which a model's layers are."""
    names = {kind.__module__ for kind in {type(module) for module in model.modules()}}
    return {sys.modules[name] for name in names if name.startswith("transformers.models.")}


class _ByPlan:
    """A function of a modeling file that runs the plan where it is given."""

    def __init__(
        self, function: Callable[..., Any], planned: Callable[..., Any], is_planned: Callable[[], bool]
    ) -> None:
        self.function, self._is_planned = function, is_planned
        self._planned = torch.compiler.disable(planned)

    def __call__(self, *args: Any, lengthwise: PlannedAttention | None = None, **asked: Any) -> Any:
        if lengthwise is not None:
            return self._planned(self.function, lengthwise, *args, **asked)
        if self._is_planned():
            name = self.function.__name__
            expected, remedy = "the plan among its arguments", "This layer would mix documents; use another model."
            raise ModelRefused(name, expected=expected, got="a call without it", remedy=remedy)
        return self.function(*args, **asked)


class _InParts:
    """A function for a whole layer, which in planned forwards leaves it to the functions of its parts."""

    def __init__(self, function: Callable[..., Any], is_planned: Callable[[], bool]) -> None:
        self._function, self._is_planned = function, is_planned

    def __call__(self, *args: Any, **asked: Any) -> Any:
        return None if self._is_planned() else self._function(*args, **asked)
