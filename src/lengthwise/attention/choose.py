"""Which attention kernel a run uses: decided once, from the device, the precision and the head size, and said why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lengthwise.attention.cuda_kernels import (
    LEAST_FLASH_ATTN,
    EfficientKernel,
    FlashAttnOps,
    TorchVarlenOps,
    flash_attn_interface,
)
from lengthwise.attention.kernels import BlockKernel, FlashCpuKernel, ReferenceKernel
from lengthwise.attention.varlen import MOST_HEAD_DIM, TOKEN_MULTIPLE, VarlenKernel

_FLASH_CAPABILITY = (8, 0)
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAbilities:
    """What of attention a GPU and the installed libraries have; `capability` is CUDA's (major, minor)."""

    capability: tuple[int, int]
    torch_flash: bool
    flash_attn: bool


def choose_kernel(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 1,
    say: Callable[[str], None] | None = None,
) -> BlockKernel:
    """Return the fastest kernel for `device` that takes `dtype` and heads of `head_dim`; `say` hears which, and why."""
    if device.type == "cpu":
        kernel, reason = FlashCpuKernel(), "the run computes on the CPU"
    else:
        kernel, reason = gpu_kernel(_abilities(device), dtype=dtype, head_dim=head_dim)
    if say is not None:
        say(f"attention kernel: {kernel.name}; because {reason}")
    return kernel


def gpu_kernel(abilities: GpuAbilities, *, dtype: torch.dtype, head_dim: int) -> tuple[BlockKernel, str]:
    """Return the kernel for a GPU with these abilities, and why it is this one."""
    bits = str(dtype).removeprefix("torch.")
    against_flash = _against_flash(abilities, dtype=dtype, head_dim=head_dim)
    if against_flash is None and abilities.torch_flash:
        return VarlenKernel(TorchVarlenOps()), f"{bits} with heads of {head_dim}, and torch has flash attention"
    if against_flash is None and abilities.flash_attn:
        reason = "this torch was built without flash attention, and the flash-attn package is installed"
        return VarlenKernel(FlashAttnOps(flash_attn_interface())), reason
    if against_flash is None:
        against_flash = (
            "this torch was built without flash attention, "
            f"and there is no flash-attn from {'.'.join(map(str, LEAST_FLASH_ATTN))}"
        )
    if dtype == torch.float32 or (dtype in _FLASH_DTYPES and abilities.capability >= _FLASH_CAPABILITY):
        return EfficientKernel(), against_flash
    return ReferenceKernel(token_multiple=TOKEN_MULTIPLE), f"{against_flash}, and efficient attention lacks {bits} here"


def _against_flash(abilities: GpuAbilities, *, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in _FLASH_DTYPES:
        return f"flash attention takes bf16, not {str(dtype).removeprefix('torch.')}"
    if abilities.capability < _FLASH_CAPABILITY:
        has = ".".join(map(str, abilities.capability))
        return f"flash attention needs compute capability 8.0, and this GPU has {has}"
    if head_dim > MOST_HEAD_DIM:
        return f"flash attention takes heads of at most {MOST_HEAD_DIM}, and this model has {head_dim}"
    return None


def _abilities(device: torch.device) -> GpuAbilities:
    return GpuAbilities(
        capability=torch.cuda.get_device_capability(device),
        torch_flash=torch.backends.cuda.is_flash_attention_available(),
        flash_attn=flash_attn_interface() is not None,
    )
