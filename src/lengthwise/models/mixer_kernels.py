"""Kernels of packages for scans and convolutions: which there are, what they cannot run, whether they are right here.

Transformers computes by fla, mamba-ssm and causal-conv1d where they are installed, else by torch's own operations, many
times slower. Before a run each scan computes small documents and spans on the device, forward and backward, and must
agree with torch's operations in fp64 on the host. Not run on a GPU yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError
from lengthwise.models.double import keep_double
from lengthwise.models.mixers import DeltaRule, Mamba2, mixing_functions

_LENGTHS = (70, 1, 129)  # of documents: shorter and longer than a chunk of any kernel
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 3e-2, torch.float32: 2e-3, torch.float64: 1e-9}
_WIDEST, _LARGEST_KEY, _CHANNELS = 4, 256, 8  # of causal-conv1d and fla
_HEADS = 2


class _Package(NamedTuple):
    """The module that transformers looks for, and what installs it."""

    module: str
    distribution: str


_FLA, _MAMBA = _Package("fla", "flash-linear-attention"), _Package("mamba_ssm", "mamba-ssm")
_PACKAGES = {
    "torch_chunk_gated_delta_rule": _FLA,
    "chunk_kimi_delta_attention": _FLA,
    "mamba2_chunk_scan": _MAMBA,
    "causal_conv1d_fn": _Package("causal_conv1d", "causal-conv1d"),
}


def choose_mixers(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, is_installed: Callable[[str], bool]
) -> Iterator[str]:
    """Yield in words by which kernels the layers of a model without attention compute on a GPU, and why.

    Raises:
        ConfigError: an installed kernel that cannot run the model, or is wrong on this device.
    """
    for name, function in mixing_functions(model).items():
        package = _PACKAGES[name]
        if not is_installed(package.module):
            install = f"pip install {package.distribution}, or 'lengthwise[hybrid]'"
            yield f"{name}: torch's operations, many times slower; because {package.module} is not there ({install})"
            continue
        _refuse(name, package, _impossible(name, model))
        if name != "causal_conv1d_fn":
            _refuse(name, package, fault_of(name, function, device, dtype))
        yield f"{name}: {package.module}; because it is installed"


def _refuse(name: str, package: _Package, fault: str | None) -> None:
    if fault is not None:
        remedy = f"Take another version of {package.distribution}, or uninstall it: torch's operations are slower."
        expected = f"a kernel of {package.module} that computes {name} of this model"
        raise ConfigError("model", expected=expected, got=fault, remedy=remedy)


def _impossible(name: str, model: nn.Module) -> str | None:
    """Return what of the model a kernel has no form for."""
    config: Any = model.config
    if name == "causal_conv1d_fn":
        for module in model.modules():
            if isinstance(module, nn.Conv1d):
                if module.kernel_size[0] > _WIDEST:
                    return f"convolutions over {module.kernel_size[0]} tokens, where it has at most {_WIDEST}"
                if module.in_channels % _CHANNELS:
                    return f"{module.in_channels} channels, where it has multiples of {_CHANNELS}"
    keys = getattr(config, "linear_key_head_dim", None) or getattr(config, "linear_head_dim", None) or 0
    if _PACKAGES[name] is _FLA and keys > _LARGEST_KEY:
        return f"keys of {keys} numbers, where it has at most {_LARGEST_KEY}"
    return None


def fault_of(name: str, function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return in words what a scan gets wrong on `device`; None: nothing."""
    exact_function = inspect.unwrap(function)
    given = _drawn(name)
    with torch.autocast(device.type, enabled=False), torch.enable_grad(), torch._C.DisableTorchFunction():
        found = _computed(name, function, {key: x.to(device, _dtype_of(key, dtype)) for key, x in given.items()})
    with torch.enable_grad(), keep_double(torch.float64):
        exact = _computed(name, exact_function, given)
    for what, expected in exact.items():
        distance = (found[what].detach().cpu().double() - expected.detach()).norm() / expected.norm().clamp_min(1e-30)
        if not distance <= _TOLERANCES[dtype]:
            return f"{what} that is {distance:.1e} from torch's in fp64, where {_TOLERANCES[dtype]:g} is rounding"
    return None


def _dtype_of(key: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if key in ("g", "A") else dtype


def _drawn(name: str, *, size: int = 64) -> dict[str, Tensor]:
    """Return operands of a scan in fp64, of three documents: states decay slowly and matter to the end."""
    draw = torch.Generator().manual_seed(0)
    rows = sum(_LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, rows, _HEADS, *shape, generator=draw, dtype=torch.float64).bfloat16().double()

    if name == "mamba2_chunk_scan":
        decay = -torch.rand(_HEADS, generator=draw, dtype=torch.float64).bfloat16().double() - 0.1
        return {"hidden_states": normal(size), "dt": normal() - 3, "B": normal(size), "C": normal(size), "A": decay}
    decays = normal(size) if name == "chunk_kimi_delta_attention" else normal()
    keys = {key: normal(size) for key in ("query", "key", "value")}
    return {**keys, "g": -0.02 * decays.abs().float().double(), "beta": normal().sigmoid().bfloat16().double()}


def _computed(name: str, function: Callable[..., Any], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a scan gives of whole documents and of spans, and the gradients of its operands."""
    x = {key: each.detach().clone().requires_grad_() for key, each in given.items()}
    if name == "mamba2_chunk_scan":
        tokens = {key: each for key, each in x.items() if key != "A"}
        scan: Any = Mamba2(function, x["A"], chunk_size=64, dt_softplus=True)
    else:
        tokens = x
        scan = DeltaRule(function, x["value"], x["key"], use_qk_l2norm_in_kernel=True)
    found = {"out": scan.run(tokens, _LENGTHS)}
    opened = scan.open(tokens, _LENGTHS)
    found |= {f"{part} of spans": each for part, each in opened._asdict().items()}
    weights = torch.Generator().manual_seed(1)
    total = sum(
        (each * torch.randn(each.shape, generator=weights, dtype=torch.float64).to(each)).sum()
        for each in found.values()
    )
    grads = torch.autograd.grad(total, [*x.values()])
    return found | {f"gradient of {key}": grad for key, grad in zip(x, grads, strict=True)}
