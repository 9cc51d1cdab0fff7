"""The attention implementations that a GPU, its libraries and a model allow, and the order in which they are tried.

Sources: the checks of `torch.nn.attention._fa3` and `sdp_utils.cpp`, torch 2.11 and 2.13; not measured on a GPU
(docs/decisions/attention-by-length.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lengthwise.attention.varlen import MOST_HEAD_DIM
from lengthwise.core.packages import release_of

LEAST_CUDNN = 90501  # before 9.5.1 a gradient's strides had to be the output's

_HALF = (torch.bfloat16, torch.float16)
_FLASH_CAPABILITY = (8, 0)
_HOPPER = 9
_BESIDE_SM80, _LATER = ((8, 6), (8, 9)), 12  # too little shared memory for some backward passes
_MOST_HEAD_DIM_THERE, _LEAST_HEAD_DIM_THERE = 192, 224
_MOST_HEAD_DIM_CUDNN = 128

LEAST_FLASH_ATTN = (2, 8)  # before, backward's 32-bit offsets overflow in packs of some thousand documents

CAPPING = ("flash_attn", "reference")
"""Implementations that cap scores, in the order in which they are tried.

No call of torch has an argument for it, and torch calls FA3 with a cap of 0.
"""

FALLBACKS = ("efficient", "reference")
BY_CAPABILITY = {_HOPPER: ("flash3", "cudnn", "flash2")}
"""Implementations that are tried first, by major compute capability; flash2 on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAbilities:
    """The abilities of a GPU and of the installed libraries.

    capability: CUDA's (major, minor), None if not known yet. torch_flash: True if torch has flash attention. flash3:
    True if its package is installed, and torch can activate it. cudnn: version of cuDNN, 0 without it, None if not
    known yet. flash_attn: version of the package flash-attn, or None.
    """

    capability: tuple[int, int] | None
    torch_flash: bool
    flash3: bool = False
    cudnn: int | None = 0
    flash_attn: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """A model's needs of attention. windowed: True with a sliding window. capped: True with capped scores."""

    dtype: torch.dtype = torch.float32
    head_dim: int = 1
    windowed: bool = False
    capped: bool = False
    heads: int = 1
    kv_heads: int = 1

    @property
    def bits(self) -> str:
        """Name of the dtype."""
        return str(self.dtype).removeprefix("torch.")


def order_of(capability: tuple[int, int], *, capped: bool = False) -> tuple[str, ...]:
    """Return the implementations in the order in which `auto` tries them. capped: True for capped scores."""
    if capped:
        return CAPPING
    return (*BY_CAPABILITY.get(capability[0], ("flash2",)), *FALLBACKS)


def obstacle(name: str, abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    """Return why the implementation `name` cannot be used, or None."""
    return against_cap(name, needs) or {
        "flash2": _against_flash2,
        "flash3": _against_flash3,
        "flash_attn": _against_flash_attn,
        "cudnn": _against_cudnn,
        "efficient": _against_efficient,
        "reference": lambda *_: None,
    }[name](abilities, needs)


def against_cap(name: str, needs: AttentionNeeds) -> str | None:
    """Return why the implementation `name` cannot cap the model's scores, or None."""
    without = needs.capped and name not in CAPPING
    return "this model caps its scores by tanh (softcap), and this kernel does not" if without else None


def _against_flash(abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    if needs.dtype not in _HALF:
        return f"flash attention takes bf16, not {needs.bits}"
    if abilities.capability is not None and abilities.capability < _FLASH_CAPABILITY:
        return f"flash attention needs compute capability 8.0, and {_this_gpu(abilities)}"
    if needs.head_dim > MOST_HEAD_DIM:
        return f"flash attention takes heads of at most {MOST_HEAD_DIM}, and this model has {needs.head_dim}"
    return None


def _against_flash2(abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    if found := _against_flash(abilities, needs):
        return found
    capability = abilities.capability or _FLASH_CAPABILITY
    little_memory = _BESIDE_SM80[0] <= capability <= _BESIDE_SM80[1] or capability[0] >= _LATER
    if little_memory and _MOST_HEAD_DIM_THERE < needs.head_dim <= _LEAST_HEAD_DIM_THERE:
        return f"flash attention 2 has no backward for heads of {needs.head_dim} there: {_this_gpu(abilities)}"
    return None if abilities.torch_flash else "this torch was built without flash attention"


def _against_flash3(abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    if found := _against_flash(abilities, needs):
        return found
    if abilities.capability is not None and abilities.capability[0] != _HOPPER:
        return f"flash attention 3 needs compute capability 9.0, and {_this_gpu(abilities)}"
    return None if abilities.flash3 else "there is no package flash_attn_interface (flash attention 3)"


def _against_flash_attn(abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    if found := _against_flash(abilities, needs):
        return found
    if (version := abilities.flash_attn) is None:
        return "there is no package flash-attn (pip install flash-attn --no-build-isolation)"
    least = ".".join(map(str, LEAST_FLASH_ATTN))
    return f"flash-attn {version} is older than {least}" if release_of(version) < LEAST_FLASH_ATTN else None


def _against_cudnn(abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    if found := _against_flash2(abilities, needs):  # which computes packs and short documents
        return found
    if needs.head_dim > _MOST_HEAD_DIM_CUDNN:
        return f"cuDNN's backward takes heads of at most {_MOST_HEAD_DIM_CUDNN}, and this model has {needs.head_dim}"
    if abilities.cudnn is not None and abilities.cudnn < LEAST_CUDNN:
        return f"attention needs cuDNN {LEAST_CUDNN}, and this torch has {abilities.cudnn or 'none'}"
    return None


def _against_efficient(abilities: GpuAbilities, needs: AttentionNeeds) -> str | None:
    recent = abilities.capability is None or abilities.capability >= _FLASH_CAPABILITY
    fits = needs.dtype == torch.float32 or (needs.dtype in _HALF and recent)
    return None if fits else f"efficient attention lacks {needs.bits} here"


def _this_gpu(abilities: GpuAbilities) -> str:
    return f"this GPU has {'.'.join(map(str, abilities.capability or ()))}"
