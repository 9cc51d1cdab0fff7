"""Which attention kernel a run uses: decided once, by name or by what is there, and said why.

`auto` takes what `abilities.order_of` names first and nothing speaks against; a name takes that or is refused. On the
CPU there are torch's flash attention for CPUs and the reference.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch.nn.attention import list_flash_attention_impls

from lengthwise.attention.abilities import (
    BY_CAPABILITY,
    FALLBACKS,
    AttentionNeeds,
    GpuAbilities,
    obstacle,
    order_of,
)
from lengthwise.attention.cuda_kernels import EfficientKernel, TorchVarlenOps
from lengthwise.attention.cudnn import ByLengthKernel, CudnnOps, DenseKernel
from lengthwise.attention.kernels import BlockKernel, FlashCpuKernel, ReferenceKernel
from lengthwise.attention.varlen import TOKEN_MULTIPLE, VarlenKernel
from lengthwise.core.errors import ConfigError

_ON_CPU = ("auto", "reference")


def choose_kernel(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 1,
    windowed: bool = False,
    implementation: str = "auto",
    say: Callable[[str], None] | None = None,
) -> BlockKernel:
    """Return the fastest kernel for `device` that takes the model, or the one named; `say` hears which, and why.

    Raises:
        ConfigError: the one named cannot be used here.
    """
    needs = AttentionNeeds(dtype=dtype, head_dim=head_dim, windowed=windowed)
    if device.type == "cpu":
        check_attention(implementation, needs, on_gpus=False)
        kernel = FlashCpuKernel() if implementation == "auto" else ReferenceKernel()
        reason = "the run computes on the CPU" if implementation == "auto" else "the run file asks for it"
    else:
        kernel, reason = gpu_kernel(_abilities(device), needs, implementation=implementation)
    if say is not None:
        say(f"attention kernel: {kernel.name}; because {reason}")
    return kernel


def check_attention(implementation: str, needs: AttentionNeeds, *, on_gpus: bool) -> None:
    """Refuse, without starting CUDA, an implementation that cannot be used whatever the GPU is.

    Raises:
        ConfigError: with what to set instead.
    """
    if on_gpus:
        against = None if implementation == "auto" else obstacle(implementation, _abilities(None), needs)
        if against is not None:
            raise _refuse(implementation, against)
    elif implementation not in _ON_CPU:
        expected = f"{' or '.join(_ON_CPU)} on the CPU"
        remedy = "Set attention: auto, or run on a GPU."
        raise ConfigError("attention", expected=expected, got=implementation, remedy=remedy)


def gpu_kernel(
    abilities: GpuAbilities, needs: AttentionNeeds, *, implementation: str = "auto"
) -> tuple[BlockKernel, str]:
    """Return the kernel for a GPU with these abilities, and why it is this one.

    Raises:
        ConfigError: the implementation that is named cannot be used there.
    """
    assert abilities.capability is not None, "the kernel is chosen on the GPU"
    if implementation != "auto":
        against = obstacle(implementation, abilities, needs)
        if against is not None:
            raise _refuse(implementation, against)
        return _build(implementation), "the run file asks for it"
    against = {name: obstacle(name, abilities, needs) for name in order_of(abilities.capability)}
    name = next(name for name, each in against.items() if each is None)
    return _build(name), _reason(name, needs, against)


def _reason(name: str, needs: AttentionNeeds, against: dict[str, str | None]) -> str:
    if name in FALLBACKS:
        return ", and ".join(str(against[each]) for each in ("flash2", *FALLBACKS[: FALLBACKS.index(name)]))
    has = "torch has flash attention" if name == "flash2" else f"this GPU and its libraries have {name}"
    reason = f"{needs.bits} with heads of {needs.head_dim}, and {has}"
    tried = list(against)[: list(against).index(name)]
    return "; ".join([reason, *(f"not {each}: {against[each]}" for each in tried)])


def _build(name: str) -> BlockKernel:
    if name == "efficient":
        return EfficientKernel()
    if name == "reference":
        return ReferenceKernel(token_multiple=TOKEN_MULTIPLE)
    if name == "flash3":
        return VarlenKernel(TorchVarlenOps(activated="FA3"))
    varlen = VarlenKernel(TorchVarlenOps())
    return varlen if name == "flash2" else ByLengthKernel(DenseKernel(CudnnOps()), varlen)


def _refuse(implementation: str, against: str) -> ConfigError:
    known = sorted({name for names in BY_CAPABILITY.values() for name in names} | set(FALLBACKS))
    others = ", ".join(name for name in known if name != implementation)
    return ConfigError(
        "attention",
        expected="auto, or an implementation that the GPU, its libraries and the model allow",
        got=f"{implementation}: {against}",
        remedy=f"Set attention: auto, or another one ({others}).",
    )


def _abilities(device: torch.device | None) -> GpuAbilities:
    """Look what a GPU and the libraries have; without a device only at what starts no CUDA."""
    activable = list_flash_attention_impls()
    return GpuAbilities(
        capability=None if device is None else torch.cuda.get_device_capability(device),
        torch_flash=torch.backends.cuda.is_flash_attention_available(),
        flash3="FA3" in activable and importlib.util.find_spec("flash_attn_interface") is not None,
        cudnn=None if device is None else torch.backends.cudnn.version() or 0,
    )
