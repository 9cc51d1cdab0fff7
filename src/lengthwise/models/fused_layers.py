"""Norms, RoPE and gated MLPs by Liger Kernel's fused functions, for one model only.

Liger patches transformers for the whole process; here modules get their own forwards, and RoPE is replaced in a copy of
the attention's forward. Liger's loss is not used: docs/decisions/own-chunked-loss.md. Source: Liger Kernel (arXiv
2410.10989), whose choices by family are below; docs/decisions/fused-layers.md.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lengthwise.attention import Case, Proof, by_autograd, faults_of_ranks, keeps_products, prove
from lengthwise.comm import Transport
from lengthwise.core.errors import ConfigError
from lengthwise.core.packages import release_of
from lengthwise.models.families import attention_heads

LEAST_LIGER = (0, 8, 5)  # the release that was tested

Forwards: TypeAlias = Mapping[nn.Module, Callable[..., Any]]
"""Forwards in place of those of the modules' classes."""

_ROPE = "apply_rotary_pos_emb"
_ROWS = 72  # of a proof's inputs
_NARROW, _MANY_ROWS = 256, 40_000  # narrow norms, as of heads, run by another kernel of Liger from 32,768 rows
_KNOWN_MODULES = ("transformers.", "liger_kernel.")  # packages whose classes compute as their family
_INSTALL = f"pip install 'liger-kernel>={'.'.join(map(str, LEAST_LIGER))}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The norms of a family. offset: addend of their weight. casting: Liger's name for the place where fp32 ends."""

    offset: float = 0.0
    casting: str = "llama"


_LIKE_LLAMA, _WIDE_WEIGHTS, _GEMMA = Kind(), Kind(casting="gemma"), Kind(offset=1.0, casting="gemma")
FUSED_FAMILIES: Mapping[str, Kind] = {
    **dict.fromkeys(("granite", "llama", "mistral", "mixtral", "olmoe", "phi3", "qwen2", "qwen3"), _LIKE_LLAMA),
    **dict.fromkeys(("qwen3_moe", "smollm3"), _LIKE_LLAMA),
    "olmo2": _WIDE_WEIGHTS,
    **dict.fromkeys(("gemma", "gemma3_text"), _GEMMA),
}
_GATES = {"silu": "liger_swiglu", "swish": "liger_swiglu", "gelu_pytorch_tanh": "liger_geglu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedNeeds:
    """The facts that decide about fused layers. liger: installed version, or None."""

    family: str
    dtype: torch.dtype
    on_gpu: bool
    compiled: bool
    liger: str | None


def choose_fused(asked: str, needs: FusedNeeds) -> tuple[str, str]:
    """Return (`liger` or `off`, reason) for `auto` or the one asked for.

    Raises:
        ConfigError: it is not available here.
    """
    if asked == "off":
        return "off", "it is asked for"
    against = _against_liger(needs)
    if against is None:
        return "liger", f"liger-kernel {needs.liger} is installed"
    if asked == "auto":
        return "off", against[0]
    expected = "auto, off, or a model that Liger can run"
    raise ConfigError("fused_layers", expected=expected, got=against[0], remedy=against[1])


def _against_liger(needs: FusedNeeds) -> tuple[str, str] | None:
    """Return (obstacle, remedy), or None."""
    off = "Set fused_layers: auto."
    if not needs.on_gpu:
        return "Liger's kernels are for GPUs", off
    if needs.compiled:
        return "compile: true fuses the same operations", "Set one of the two."
    if needs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"Liger's kernels compute in fp32, and this model in {str(needs.dtype).removeprefix('torch.')}", off
    if needs.family not in FUSED_FAMILIES:
        return f"{needs.family} is not among the supported families ({', '.join(sorted(FUSED_FAMILIES))})", off
    if needs.liger is None:
        return "liger-kernel is not installed", f"{_INSTALL}, or set fused_layers: auto."
    if release_of(needs.liger) < LEAST_LIGER:
        least = ".".join(map(str, LEAST_LIGER))
        return f"liger-kernel {needs.liger} is older than {least}", f"{_INSTALL}, or set fused_layers: auto."
    return None


def liger_functions() -> Any:
    """Import the module of Liger's functions."""
    return importlib.import_module("liger_kernel.transformers.functional")


def choose_forwards(
    model: Any, asked: str, needs: FusedNeeds, device: torch.device, transport: Transport | None = None
) -> tuple[Forwards, str]:
    """Return fused forwards, if they are right on every rank, and what they replace, or why not. Collective on GPUs.

    transport: if None, this rank chooses alone.

    Raises:
        ConfigError: Liger is asked for, and is not available or is wrong.
    """
    name, reason = choose_fused(asked, needs)
    if asked == "off" or not (needs.on_gpu or name == "liger"):
        return {}, f"off; because {reason}"
    forwards, done, proof = dict[nn.Module, Any](), "", Proof(fault=reason)
    if name == "liger":
        try:
            forwards, done = fused_forwards(model, liger_functions())
            proof = prove(_cases(model, forwards, needs.dtype, device), needs.dtype, device)
        except (ImportError, AttributeError) as error:
            proof = Proof(fault=f"liger-kernel {needs.liger} cannot be imported: {error}")
    against = faults_of_ranks(transport, {"liger": proof.fault}).get("liger")
    if against is None:
        return forwards, f"liger ({done}); because {reason}; {proof}"
    if name == "liger":
        against = f"a function of Liger is wrong or missing: {against}"
    if asked == "liger":
        expected, remedy = "functions of Liger that compute as transformers does", "Set fused_layers: auto."
        raise ConfigError("fused_layers", expected=expected, got=against, remedy=remedy)
    return {}, f"off; because {against}"


def fused_forwards(model: Any, liger: Any) -> tuple[Forwards, str]:
    """Return fused forwards for the norms, MLPs and attentions of a model of a known family, and what they replace.

    liger: the module of its functions, rms_norm(x, weight, eps, offset, casting, in_place), swiglu(a, b), geglu(a, b)
    and rope(q, k, cos, sin), with names that begin with `liger_`. Modules with a class or a forward of the user's keep
    their own.
    """
    kind, gate = FUSED_FAMILIES[model.config.model_type], _gate(model.config)
    found, forwards = Counter[str](), dict[nn.Module, Callable[..., Any]]()
    # Partial functions, not closures, so that a copy of the model runs its own modules.
    for module in model.modules():
        name = type(module).__name__
        if "forward" in vars(module) or not type(module).__module__.startswith(_KNOWN_MODULES):
            continue
        if name.endswith("RMSNorm"):
            forwards[module] = partial(_norm, module, liger.liger_rms_norm, kind)
            found["norms"] += 1
        elif gate is not None and name.endswith("MLP") and hasattr(module, "down_proj"):
            forwards[module] = partial(_gated, module, getattr(liger, gate))
            found["gated MLPs"] += 1
        elif _ROPE in _names(module):
            rope = partial(_rope, liger.liger_rope)
            forwards[module] = partial(_with_global(_forward(module), _ROPE, rope), module)
            found["attentions (RoPE)"] += 1
    return forwards, ", ".join(f"{number} {what}" for what, number in found.items()) or "no layer of this model"


def _cases(model: Any, forwards: Mapping[Any, Any], dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield a call of every class and size of fused modules, with the class's own forward as the reference."""
    random, heads = torch.Generator().manual_seed(0), attention_heads(model.config)
    half = next(len(each) for name, each in model.named_buffers() if name.endswith("inv_freq"))
    angles = torch.arange(_ROWS, device="cpu")[:, None] * torch.linspace(0, 1, half, device="cpu").repeat(2)
    turns = [each[None].to(device, dtype) for each in (angles.cos(), angles.sin())]
    for module, forward in {(type(each), str(each)): (each, forwards[each]) for each in forwards}.values():
        own: Any = _forward(module)
        if _ROPE in _names(module):
            sizes = {name: (1, _ROWS, number, module.head_dim) for name, number in zip("qk", heads, strict=True)}
            runs = [partial(_turned, each.__globals__[_ROPE], turns) for each in (forward.func, own)]
        else:
            runs = [partial(_alone, module, *each) for each in ((forward.func, *forward.args[1:]), (own,))]
            if hasattr(module, "down_proj"):
                sizes = dict.fromkeys(("gate", "up"), (1, _ROWS, module.down_proj.in_features))
            else:
                width = module.weight.shape[-1]
                sizes = {"x": (1, _ROWS if width > _NARROW else _MANY_ROWS, width), "weight": (width,)}
        inputs = {
            name: torch.randn(size, generator=random, device="cpu", dtype=torch.float32).to(device, dtype)
            for name, size in sizes.items()
        }
        yield Case(name=type(module).__name__, run=partial(by_autograd, *runs, inputs))


def _turned(rope: Callable[..., Any], turns: list[Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn queries and keys that lie in memory as in a model, where Liger works in place."""
    q, k = (x.transpose(1, 2) for x in inputs.values())
    return dict(zip("qk", rope(q, k, *(each.to(q.dtype) for each in turns)), strict=True))


def _alone(module: nn.Module, forward: Callable[..., Tensor], *arguments: Any) -> dict[str, Tensor]:
    """Run a forward of a norm, or of an MLP without projections, with two inputs in place of the module's values."""
    alone, (first, second) = copy.copy(module), arguments[-1].values()
    parts = {"weight": second, "gate_proj": lambda _: first, "up_proj": lambda _: second, "down_proj": lambda x: x}
    parts["gate_up_proj"] = lambda _: torch.cat((first, second), dim=-1)
    vars(alone).update({name: part for name, part in parts.items() if hasattr(module, name)})
    return {"out": forward(alone, *arguments[:-1], first)}


def _gate(config: Any) -> str | None:
    return _GATES.get(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))


def _norm(module: Any, rms_norm: Callable[..., Tensor], kind: Kind, x: Tensor) -> Tensor:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    # Not in place: beside a residual the incoming gradient has other users.
    return rms_norm(x, module.weight, eps, kind.offset, kind.casting, False)


def _rope(rope: Callable[..., Any], q: Tensor, k: Tensor, *angles: Any, **options: Any) -> Any:
    if keeps_products():  # q and k may be results of products that are kept, and Liger turns them in place, unseen
        q, k = q.clone(), k.clone()
    return rope(q, k, *angles, **options)


def _gated(module: Any, gate: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    if hasattr(module, "gate_up_proj"):
        return module.down_proj(gate(*module.gate_up_proj(x).chunk(2, dim=-1)))
    return module.down_proj(gate(module.gate_proj(x), module.up_proj(x)))


def _names(module: nn.Module) -> tuple[str, ...]:
    """Return the global names in a module's forward, or none if it is wrapped in another function."""
    forward = _forward(module)
    return forward.__code__.co_names if isinstance(forward, FunctionType) and not forward.__closure__ else ()


def _forward(module: nn.Module) -> Any:
    """Return the forward of a module's class, without the wrap of transformers (from 5.24) for old names."""
    forward: Any = type(module).forward
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


def _with_global(function: Any, name: str, value: Any) -> Any:
    names = {**function.__globals__, name: value}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
