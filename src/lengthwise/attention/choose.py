"""Choose a run's attention kernel once, by name or by `abilities.order_of`, and report it with the reason.

The kernel is proved on the device (`proof`); no rank uses one that fails on any rank.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch.nn.attention import list_flash_attention_impls

from lengthwise.attention.abilities import (
    BY_CAPABILITY,
    CAPPING,
    FALLBACKS,
    AttentionNeeds,
    GpuAbilities,
    against_cap,
    obstacle,
    order_of,
)
from lengthwise.attention.cuda_kernels import EfficientKernel, FlashAttnOps, TorchVarlenOps
from lengthwise.attention.cudnn import ByLengthKernel, CudnnOps, DenseKernel
from lengthwise.attention.kernels import BlockKernel, FlashCpuKernel, ReferenceKernel
from lengthwise.attention.proof import Proof, faults_of_ranks
from lengthwise.attention.proof_cases import prove_kernel
from lengthwise.attention.varlen import TOKEN_MULTIPLE, VarlenKernel
from lengthwise.comm import Transport
from lengthwise.core.errors import ConfigError
from lengthwise.core.packages import installed_version

_CAPPED = "this model caps its scores by tanh (softcap), which"
_BY_CAP = f"{_CAPPED} no fused kernel here does; this one is slow"
_ON_CPU = ("auto", "reference")
_CPU_ORDER = ("flash_cpu", "reference")
_ANY_NEEDS = AttentionNeeds()


def choose_kernel(
    device: torch.device,
    needs: AttentionNeeds = _ANY_NEEDS,
    *,
    implementation: str = "auto",
    say: Callable[[str], None] | None = None,
    transport: Transport | None = None,
) -> BlockKernel:
    """Return the fastest kernel for `device` and the needs of the model, or the named one.

    say: called with the choice and its reason, and with wrong kernels that are not used. If None, wrong ones are Python
    warnings. transport: of all ranks, which choose together. If None, this rank chooses alone.

    Raises:
        ConfigError: the named kernel cannot be used here or is wrong, or every kernel is wrong.
    """
    abilities = None if device.type == "cpu" else _abilities(device)
    if abilities is None:
        check_attention(implementation, needs, on_gpus=False)
    faults: dict[str, str] = {}
    while True:
        name, reason = _chosen(abilities, needs, implementation, faults)
        proof = _proof(name, needs, device)
        new = faults_of_ranks(transport, {name: proof.fault})
        if not new:
            break
        for wrong, fault in new.items():
            line = f"attention kernel: {wrong} is not used, because it is wrong on this device: {fault}"
            (say or warnings.warn)(line)
        faults |= new
    kernel = _build(name, on_gpu=abilities is not None)
    if say is not None:
        say(f"attention kernel: {kernel.name}; because {reason}; {proof}")
    return kernel


def check_attention(implementation: str, needs: AttentionNeeds, *, on_gpus: bool) -> None:
    """Check that some GPU could run an implementation, without starting CUDA."""
    if on_gpus:
        against = None if implementation == "auto" else obstacle(implementation, _abilities(None), needs)
        if against is not None:
            raise _refuse(implementation, against)
    elif implementation not in _ON_CPU:
        expected = f"{' or '.join(_ON_CPU)} on the CPU"
        remedy = "Set attention: auto, or run on a GPU."
        raise ConfigError("attention", expected=expected, got=implementation, remedy=remedy)


def _chosen(
    abilities: GpuAbilities | None, needs: AttentionNeeds, implementation: str, faults: Mapping[str, str]
) -> tuple[str, str]:
    if implementation != "auto":
        against = faults.get(implementation) or (abilities and obstacle(implementation, abilities, needs))
        if against:
            raise _refuse(implementation, against)
        return implementation, "it is asked for"
    if abilities is None:
        against = {name: against_cap(name, needs) or faults.get(name) for name in _CPU_ORDER}
    else:
        assert abilities.capability is not None, "the kernel is chosen on the GPU"
        order = order_of(abilities.capability, capped=needs.capped)
        against = {name: obstacle(name, abilities, needs) or faults.get(name) for name in order}
    name = next((name for name, each in against.items() if each is None), None)
    if name is None:
        got = "; ".join(f"{name}: {each}" for name, each in against.items())
        remedy = "Run on the CPU (device: cpu), or with another release of torch."
        expected = "a kernel that computes attention on this device"
        raise ConfigError("attention", expected=expected, got=got, remedy=remedy)
    if abilities is None:
        capped = f", and {_BY_CAP}" if needs.capped else ""
        wrong = "".join(f", and {each} is wrong on it" for each in faults)
        return name, f"the run computes on the CPU{capped}{wrong}"
    return name, _reason(name, needs, against)


@cache
def _proof(name: str, needs: AttentionNeeds, device: torch.device) -> Proof:
    return prove_kernel(_build(name, on_gpu=device.type != "cpu"), needs, device)


def _reason(name: str, needs: AttentionNeeds, against: dict[str, str | None]) -> str:
    if needs.capped:
        reason = _BY_CAP if name == "reference" else f"{_CAPPED} the package flash-attn does"
    elif name in FALLBACKS:
        return ", and ".join(str(against[each]) for each in ("flash2", *FALLBACKS[: FALLBACKS.index(name)]))
    else:
        has = "torch has flash attention" if name == "flash2" else f"this GPU and its libraries have {name}"
        reason = f"{needs.bits} with heads of {needs.head_dim}, and {has}"
    tried = list(against)[: list(against).index(name)]
    return "; ".join([reason, *(f"not {each}: {against[each]}" for each in tried)])


def _build(name: str, *, on_gpu: bool = True) -> BlockKernel:
    if name == "flash_cpu":
        return FlashCpuKernel()
    if name == "efficient":
        return EfficientKernel()
    if name == "reference":
        return ReferenceKernel(token_multiple=TOKEN_MULTIPLE if on_gpu else 1)
    if name == "flash_attn":
        return VarlenKernel(FlashAttnOps())
    if name == "flash3":
        return VarlenKernel(TorchVarlenOps(activated="FA3"))
    varlen = VarlenKernel(TorchVarlenOps())
    return varlen if name == "flash2" else ByLengthKernel(DenseKernel(CudnnOps()), varlen)


def _refuse(implementation: str, against: str) -> ConfigError:
    known = sorted({name for names in BY_CAPABILITY.values() for name in names} | {*FALLBACKS, *CAPPING})
    others = ", ".join(name for name in known if name != implementation)
    expected = "auto, or an implementation that the GPU, its libraries and the model allow"
    got, remedy = f"{implementation}: {against}", f"Set attention: auto, or another one ({others})."
    return ConfigError("attention", expected=expected, got=got, remedy=remedy)


def _abilities(device: torch.device | None) -> GpuAbilities:
    """Return the abilities of a GPU and the libraries; without a device only those known without starting CUDA."""
    activable = list_flash_attention_impls()
    return GpuAbilities(
        capability=None if device is None else torch.cuda.get_device_capability(device),
        torch_flash=torch.backends.cuda.is_flash_attention_available(),
        flash3="FA3" in activable and importlib.util.find_spec("flash_attn_interface") is not None,
        cudnn=None if device is None else torch.backends.cudnn.version() or 0,
        flash_attn=installed_version("flash-attn"),
    )
