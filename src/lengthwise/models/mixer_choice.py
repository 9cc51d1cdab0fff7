"""Choose the kernels of layers that mix tokens without attention, at a run's start, and report them.

On GPUs a package's function is used if it is installed, takes the model and is right on the device: it is proved
(`attention.proof`) by transformers' own function, on small documents and cut spans, or transformers' function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.attention import Case, by_autograd, faults_of_ranks, prove
from lengthwise.comm import Transport
from lengthwise.models.mixer_kernels import (
    CONVOLUTION,
    KDA,
    MAMBA2,
    PACKAGES,
    MixerKernel,
    convolution_of,
    key_size,
    package_kernel,
    plain_kernel,
)
from lengthwise.models.mixer_layers import DeltaRule, Mamba2, mixers_in, plain_function, use_kernels

_CHUNK = 64  # tokens that fla computes at a time; Mamba 2's config has its own


def choose_mixers(
    model: nn.Module,
    transport: Transport,
    device: torch.device,
    *,
    dtype: torch.dtype,
    say: Callable[[str], None] | None = None,
) -> None:
    """Choose and install the kernel for each kind of layer that mixes tokens without attention. Collective.

    say: callback for each choice and its reason, by default a print on rank 0. On the CPU there is no choice.
    """
    names = mixers_in(model) if takes_packages(device) else []
    kernels = {name: package_kernel(PACKAGES[name], layers_of(model), dtype) for name in names}
    lines, faults = dict[str, str](), dict[str, str | None]()
    for name, kernel in kernels.items():
        if isinstance(kernel, str):
            faults[name] = kernel
            continue
        proof = prove(cases_of(name, kernel, model, dtype, device), dtype, device)
        faults[name] = proof.fault and f"{kernel.name} is wrong on this device: {proof.fault}"
        lines[name] = f"{kernel.name}; because it computes as transformers does on this device; {proof}"
    against = faults_of_ranks(transport, faults)
    for name, kernel in kernels.items():
        line = f"{PACKAGES[name].title}: "
        if name in against:
            line += f"transformers' own function, which is slower; because {against[name]}"
        else:
            assert isinstance(kernel, MixerKernel), f"{name}: {kernel}"
            use_kernels(model, {(name, dtype): kernel})
            line += lines[name]
        if say is not None:
            say(line)
        elif transport.rank == 0:
            print(f"lengthwise: {line}", flush=True)


def takes_packages(device: torch.device) -> bool:
    """Return whether packages have kernels for a device."""
    return device.type == "cuda"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the layers that mix tokens without attention, one per class and size."""
    found = {(type(each), str(each)): each for each in model.modules() if convolution_of(each) is not None}
    return [*found.values()]


def cases_of(
    name: str, kernel: MixerKernel, model: nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """Yield a kernel's call for every layer that differs, with transformers' own function."""
    plain = plain_kernel(name, plain_function(model, name))
    for layer in layers_of(model):
        inputs = {each: x.to(device) for each, x in _drawn(name, layer, dtype).items()}
        runs = (partial(_computed, name, each, layer) for each in (kernel, plain))
        yield Case(name=type(layer).__name__, run=partial(by_autograd, *runs, inputs))


def _computed(name: str, kernel: MixerKernel, layer: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a kernel's outputs, maps and states for random tokens."""
    if name == CONVOLUTION:
        rows, weight, bias = inputs["rows"], inputs["weight"], inputs.get("bias")
        return {"out": kernel.run(rows.t()[None], weight, bias, activation=getattr(layer, "activation", None))}
    parts, scan = dict(inputs), DeltaRule(kernel, use_qk_l2norm_in_kernel=True)
    if name == MAMBA2:
        beside = {each: parts.pop(each) for each in ("D", "dt_bias")}
        how = {"chunk_size": layer.chunk_size, "dt_softplus": True, "dt_limit": layer.time_step_limit}
        scan = Mamba2(kernel, parts.pop("A"), **beside, **how)
    lengths = _lengths(layer)
    opened = scan.open(parts, [*lengths[:2], 0, *lengths[2:]])
    found = {"out": scan.run(parts, lengths, before=None, states=False)[0], "out from zero": opened.out}
    found |= {"reader": opened.reader, "map": opened.a, "state": opened.b}
    before = torch.cat([opened.b[:2], opened.b[3:]])
    out, states = scan.run(parts, lengths, before=before, states=True)
    assert states is not None, "states that were asked for"
    return {**found, "out from states": out, "state after states": states}


def _lengths(layer: Any) -> list[int]:
    return [37, 1, getattr(layer, "chunk_size", _CHUNK) + 35, 5]


def _drawn(name: str, layer: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw inputs of a layer like this one, with few heads, the same on all ranks."""
    random, rows = torch.Generator().manual_seed(0), sum(_lengths(layer))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cpu", dtype=torch.float32)

    if name == CONVOLUTION:
        convolution = convolution_of(layer)
        assert convolution is not None, f"{type(layer).__name__} has a convolution"
        channels = min(64, convolution.in_channels)
        drawn = {"rows": normal(rows, channels), "weight": normal(channels, convolution.kernel_size[0])}
        drawn |= {} if convolution.bias is None else {"bias": normal(channels)}
        return {each: x.to(dtype) for each, x in drawn.items()}
    if name == MAMBA2:
        groups = min(2, layer.n_groups)
        heads = groups * min(2, layer.num_heads // layer.n_groups)
        shape, state = (1, rows, heads), (1, rows, groups, layer.ssm_state_size)
        drawn = {"hidden_states": normal(*shape, layer.head_dim), "dt": normal(*shape) - 2}
        drawn |= {"B": normal(*state) / state[-1] ** 0.5, "C": normal(*state), "D": normal(heads)}
        wide = {"A": -normal(heads).exp() / 4, "dt_bias": normal(heads) / 4}
        return {each: x.to(dtype) for each, x in drawn.items()} | wide
    key = key_size(layer)
    value_heads = getattr(layer, "num_v_heads", None) or layer.num_heads
    key_heads = getattr(layer, "num_k_heads", None) or layer.num_heads
    few = min(2, key_heads)
    heads = few * (value_heads // key_heads)
    drawn = {each: normal(1, rows, few, key) for each in ("query", "key")}
    drawn["value"] = normal(1, rows, heads, getattr(layer, "head_v_dim", None) or key)
    drawn["beta"] = normal(1, rows, heads).sigmoid()
    decay = -normal(1, rows, heads, *([key] if name == KDA else [])).exp() / 16
    return {each: x.to(dtype) for each, x in drawn.items()} | {"g": decay}
