"""Kernels of layers that mix tokens without attention: functions of transformers, and of packages for GPUs.

A plan gives a kernel several spans: whole documents, sequences that continue others or are continued, and cut spans,
separately. The functions of transformers take one span per call and run anywhere. fla takes all spans in one call, each
with a state; mamba-ssm takes whole documents in one call, but one first and one last state per call; causal-conv1d
takes one row that contains the halos of its spans. Written for fla-core 0.6.0, mamba-ssm 2.3.2 and causal-conv1d 1.6.1;
docs/gpu.md says where they ran.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.attention import to_device

Tokens = Mapping[str, Tensor]

DELTA_RULE, KDA = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
MAMBA2, CONVOLUTION = "mamba2_chunk_scan", "causal_conv1d_fn"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_KEY = 256  # largest key of fla
_WIDTHS, _CHANNELS = (2, 3, 4), 8  # widths of causal-conv1d, and the divisor of its channels
_ACTIVATIONS = (None, "silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerKernel:
    """An implementation of one of transformers' functions. name: name of its package.

    run: for a scan (tokens by name, lengths of spans, before=states before them or None, states=whether to return those
    after them, **arguments of the function) -> (outputs (1, rows, ...), states (spans, ...) or None); for a convolution
    the function itself. steps_in_fp32: True if Mamba 2's step sizes are in fp32, not in the dtype of the tokens.
    """

    name: str
    run: Callable[..., Any]
    steps_in_fp32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package with a kernel for GPUs. arguments: names that its function must accept. make: wrapper of it."""

    title: str
    distribution: str
    module: str
    function: str
    arguments: tuple[str, ...]
    make: Callable[[Callable[..., Any]], MixerKernel]
    against: Callable[[Any], str | None]
    """Returns why it cannot compute a layer, or None."""


def spans_in(tokens: Tokens, lengths: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Yield a scan's inputs for every span."""
    parts = {name: x.split([*lengths], dim=1) for name, x in tokens.items()}
    for number in range(len(lengths)):
        yield {name: each[number] for name, each in parts.items()}


def plain_kernel(name: str, function: Callable[..., Any]) -> MixerKernel:
    """Return a kernel of transformers' own function in plain torch."""
    if name == CONVOLUTION:
        return MixerKernel(name="transformers", run=function)
    given = "initial_states" if name == MAMBA2 else "initial_state"
    asked = "return_final_states" if name == MAMBA2 else "output_final_state"

    def run(
        tokens: Tokens, lengths: Sequence[int], *, before: Tensor | None, states: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        starts = [None] * len(lengths) if before is None else before.split(1)
        if states:
            how[asked] = True
        spans = zip(spans_in(tokens, lengths), starts, strict=True)
        found = [function(**each, **{given: start}, **how) for each, start in spans]
        return _joined([each if isinstance(each, tuple) else (each, None) for each in found])

    return MixerKernel(name="transformers", run=run)


def _joined(found: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    states = [state for _, state in found if state is not None]
    return torch.cat([out for out, _ in found], dim=1), torch.cat(states) if states else None


def _fla_kernel(function: Callable[..., Any]) -> MixerKernel:
    def run(
        tokens: Tokens, lengths: Sequence[int], *, before: Tensor | None, states: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        borders, on_device = _borders(tuple(lengths), tokens["value"].device)
        return function(
            q=tokens["query"],
            k=tokens["key"],
            v=tokens["value"],
            g=tokens["g"],
            beta=tokens["beta"],
            initial_state=None if before is None else before.contiguous(),
            output_final_state=states,
            cu_seqlens=on_device,
            cu_seqlens_cpu=borders,  # otherwise the host waits for the device
            **how,
        )

    return MixerKernel(name="fla-core", run=run)


def _mamba_kernel(function: Callable[..., Any]) -> MixerKernel:
    # Releases up to 2.3.2 have no such argument, and keep states in the dtype of the tokens.
    wide = {"state_dtype": torch.float32} if "state_dtype" in inspect.signature(function).parameters else {}

    def call(hidden_states: Tensor, dt: Tensor, **how: Any) -> Any:
        return function(hidden_states, dt, **wide, **how)

    one_by_one = plain_kernel(MAMBA2, call).run  # it takes the first document's state, and returns the last one's

    def run(
        tokens: Tokens, lengths: Sequence[int], *, before: Tensor | None, states: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        if states or before is not None:
            return one_by_one(tokens, lengths, before=before, states=states, **how)
        return call(**tokens, seq_idx=_numbers(tuple(lengths), tokens["dt"].device), **how), None

    return MixerKernel(name="mamba-ssm", run=run, steps_in_fp32=True)


def _conv_kernel(function: Callable[..., Any]) -> MixerKernel:
    return MixerKernel(name="causal-conv1d", run=function)


@lru_cache(maxsize=16)  # all layers of a microbatch need the same, and fla caches by the tensor
def _borders(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a later backward saves it
        borders = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
        return borders, to_device(borders, device)


@lru_cache(maxsize=16)
def _numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of each row's document, (1, rows)."""
    with torch.inference_mode(False):
        numbers = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
        return to_device(numbers.repeat_interleave(torch.tensor(lengths, device="cpu"))[None], device)


def key_size(layer: Any) -> int:
    """Return the size of a key of a layer with a delta rule."""
    return getattr(layer, "head_k_dim", None) or layer.head_dim


def convolution_of(layer: nn.Module) -> nn.Conv1d | None:
    """Return a layer's own convolution; every layer that mixes tokens without attention has one."""
    return next((child for child in layer.children() if isinstance(child, nn.Conv1d)), None)


def _against_fla(layer: Any) -> str | None:
    key = key_size(layer)
    return f"it takes keys of at most {_MOST_KEY}, and this model has {key}" if key > _MOST_KEY else None


def _against_conv(layer: Any) -> str | None:
    convolution = convolution_of(layer)
    assert convolution is not None, f"{type(layer).__name__} has a convolution"
    width, channels, activation = (
        convolution.kernel_size[0],
        convolution.in_channels,
        getattr(layer, "activation", None),
    )
    if width not in _WIDTHS:
        return f"it takes widths of {_WIDTHS[0]} to {_WIDTHS[-1]}, and this model has {width}"
    if channels % _CHANNELS:
        return f"it takes channels in multiples of {_CHANNELS}, and this model has {channels}"
    if activation not in _ACTIVATIONS:
        return f"it has no activation {activation}"
    return None


PACKAGES: Mapping[str, Package] = {
    DELTA_RULE: Package(
        title="gated delta rule",
        distribution="fla-core",
        module="fla.ops.gated_delta_rule",
        function="chunk_gated_delta_rule",
        arguments=("cu_seqlens", "cu_seqlens_cpu"),
        make=_fla_kernel,
        against=_against_fla,
    ),
    KDA: Package(
        title="Kimi delta attention",
        distribution="fla-core",
        module="fla.ops.kda",
        function="chunk_kda",
        arguments=("cu_seqlens", "cu_seqlens_cpu"),
        make=_fla_kernel,
        against=_against_fla,
    ),
    MAMBA2: Package(
        title="Mamba 2",
        distribution="mamba-ssm",
        module="mamba_ssm.ops.triton.ssd_combined",
        function="mamba_chunk_scan_combined",
        arguments=("seq_idx", "initial_states", "return_final_states"),
        make=_mamba_kernel,
        against=lambda _: None,
    ),
    CONVOLUTION: Package(
        title="short convolution",
        distribution="causal-conv1d",
        module="causal_conv1d",
        function="causal_conv1d_fn",
        arguments=("activation",),
        make=_conv_kernel,
        against=_against_conv,
    ),
}
"""Packages for GPUs, by transformers' function."""


def package_kernel(package: Package, layers: Sequence[nn.Module], dtype: torch.dtype) -> MixerKernel | str:
    """Return a package's kernel, or why it cannot compute these layers of a model in `dtype`."""
    if dtype not in _DTYPES:
        return f"{package.distribution} takes bf16, fp16 or fp32, not {str(dtype).removeprefix('torch.')}"
    against = next(filter(None, map(package.against, layers)), None)
    if against is not None:
        return f"{package.distribution}: {against}"
    try:
        function = getattr(importlib.import_module(package.module), package.function)
    except ModuleNotFoundError as error:
        if error.name is not None and package.module.split(".")[0] == error.name.split(".")[0]:
            return f"there is no package {package.distribution} (pip install 'lengthwise[hybrid]')"
        return f"{package.distribution} cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - a package built for another torch may raise anything
        return (
            f"{package.distribution} cannot be imported: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        )
    missing = [name for name in package.arguments if name not in inspect.signature(function).parameters]
    if missing:
        return f"{package.distribution} is too old: its {package.function} takes no {', '.join(missing)}"
    return package.make(function)
