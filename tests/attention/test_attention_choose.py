"""Which attention kernel is chosen, refused and activated, and what is said of it: without a GPU."""

import sys
from dataclasses import replace

import pytest
import torch
from testing.varlen import ReferenceFlashAttn

from lengthwise.attention import AttentionNeeds, ReferenceKernel, check_attention, choose_kernel
from lengthwise.attention.abilities import GpuAbilities
from lengthwise.attention.choose import _build, _chosen
from lengthwise.attention.packs import PackKernel
from lengthwise.attention.proof_cases import prove_kernel
from lengthwise.core.errors import ConfigError

CPU = torch.device("cpu")
ALL = {"torch_flash": True, "flash3": True, "cudnn": 91900}
NOTHING = {"torch_flash": False, "flash3": False, "cudnn": 0}
INSTALL = "there is no package flash-attn (pip install flash-attn --no-build-isolation)"
FLASH2, NO_FLASH3 = {"torch_flash": True}, {"torch_flash": True, "cudnn": 91900}
BF16 = AttentionNeeds(dtype=torch.bfloat16, head_dim=128)


def gpu_kernel(abilities, needs, *, implementation="auto", faults=()):
    name, reason = _chosen(abilities, needs, implementation, dict(faults))
    return _build(name), reason


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "has", "name", "reason"),
    [
        ("bfloat16", 128, (9, 0), ALL, "torch flash attention 3, varlen", "this GPU and its libraries have flash3"),
        ("bfloat16", 128, (12, 0), ALL, "torch flash attention, varlen", "and torch has flash attention"),
        ("bfloat16", 128, (9, 0), NO_FLASH3, "cuDNN from 4,096 tokens", "have cudnn; not flash3: there is no pack"),
        ("bfloat16", 128, (8, 0), {}, "torch efficient", "built without flash attention"),
        ("bfloat16", 64, (7, 5), FLASH2, "reference", "this GPU has 7.5, and efficient attention lacks bf"),
        ("float32", 64, (9, 0), ALL, "torch efficient", "takes bf16, not float32"),
    ],
)
def test_gpu_kernel_is_chosen_and_said_why(dtype, head_dim, capability, has, name, reason):
    needs = AttentionNeeds(dtype=getattr(torch, dtype), head_dim=head_dim)
    kernel, said = gpu_kernel(GpuAbilities(capability=capability, **{**NOTHING, **has}), needs)
    assert kernel.name.startswith(name)
    assert reason in said
    assert kernel.token_multiple == 128
    assert isinstance(kernel, PackKernel) == ("flash" in name or "cuDNN" in name)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "got"),
    [
        ("flash3", (10, 0), torch.bfloat16, 64, "flash3: flash attention 3 needs compute capability 9.0, and this GPU"),
        ("cudnn", (9, 0), torch.bfloat16, 192, "cudnn: cuDNN's backward takes heads of at most 128"),
        ("flash2", (8, 6), torch.bfloat16, 224, "flash2: flash attention 2 has no backward for heads of 224 there"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_the_reason(name, capability, dtype, head_dim, got):
    with pytest.raises(ConfigError) as refused:
        gpu_kernel(
            GpuAbilities(capability=capability, **ALL),
            AttentionNeeds(dtype=dtype, head_dim=head_dim),
            implementation=name,
        )
    assert refused.value.got.startswith(got)
    assert "Set attention: auto" in refused.value.remedy


def test_scores_that_are_capped_go_to_the_kernel_that_can():
    capped, why = replace(BF16, capped=True), "this model caps its scores by tanh (softcap), "
    abilities, said = GpuAbilities(capability=(9, 0), **ALL), []
    kernel, reason = gpu_kernel(abilities, capped)
    assert isinstance(kernel, ReferenceKernel)
    slow = f"{why}which no fused kernel here does; this one is slow"
    assert reason == f"{slow}; not flash_attn: {INSTALL}"
    with pytest.raises(ConfigError) as refused:
        gpu_kernel(abilities, capped, implementation="flash3")
    assert refused.value.got == f"flash3: {why}and this kernel does not"
    assert isinstance(choose_kernel(CPU, AttentionNeeds(capped=True), say=said.append), ReferenceKernel)
    assert said[0].startswith(f"attention kernel: {kernel.name}; because the run computes on the CPU, and {slow}; ")


def test_the_package_flash_attn_caps_scores_where_it_is_there_and_right(monkeypatch):
    capped = replace(BF16, capped=True)
    gpu = GpuAbilities(capability=(8, 6), flash_attn="2.8.3+cu12torch2.9", **NOTHING)
    kernel, reason = gpu_kernel(gpu, capped)
    assert (kernel.name, kernel.caps_scores) == ("flash attention 2 of flash-attn, varlen", True)
    assert reason == "this model caps its scores by tanh (softcap), which the package flash-attn does"
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)  # cannot be imported
    fault = prove_kernel(kernel, capped, CPU).fault
    assert "causal block of 72 tokens, heads of 128, bfloat16: ModuleNotFoundError" in fault
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", ReferenceFlashAttn())
    assert prove_kernel(kernel, capped, CPU).fault is prove_kernel(kernel, BF16, CPU).fault is None
    old = replace(gpu, flash_attn="2.7.4.post1")
    for abilities, faults, against in ((old, {}, "2.7.4.post1 is older than 2.8"), (gpu, {"flash_attn": "off"}, "off")):
        kernel, reason = gpu_kernel(abilities, capped, faults=faults)
        assert isinstance(kernel, ReferenceKernel)
        assert reason.endswith(against)


def test_on_the_cpu_the_reference_can_be_named_and_kernels_of_gpus_cannot():
    said = []
    chosen = choose_kernel(CPU, AttentionNeeds(dtype=torch.bfloat16, head_dim=64), say=said.append)
    kernel = choose_kernel(CPU, implementation="reference", say=said.append)
    assert isinstance(kernel, ReferenceKernel)
    assert kernel.token_multiple == 1
    assert [line.partition("; proved in")[0] for line in said] == [
        f"attention kernel: {chosen.name}; because the run computes on the CPU",
        "attention kernel: reference (matrix products); because it is asked for",
    ]
    with pytest.raises(ConfigError, match="expected auto or reference on the CPU; got flash3"):
        choose_kernel(CPU, implementation="flash3")


def test_what_no_gpu_could_do_is_refused_without_one():
    fp32 = AttentionNeeds(dtype=torch.float32, head_dim=64)
    with pytest.raises(ConfigError, match="flash2: flash attention takes bf16, not float32"):
        check_attention("flash2", fp32, on_gpus=True)
    with pytest.raises(ConfigError, match="flash3: there is no package flash_attn_interface"):
        check_attention("flash3", BF16, on_gpus=True)
    for name in ("auto", "efficient", "reference"):
        check_attention(name, fp32, on_gpus=True)
