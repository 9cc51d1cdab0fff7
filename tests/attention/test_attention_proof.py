"""Which attention kernel is chosen, refused and said, without a GPU; kernels that are wrong on purpose are not used."""

import sys
import threading
from dataclasses import replace

import pytest
import torch
from testing.strict import StrictWorld
from testing.varlen import ReferenceDenseOps, ReferenceFlashAttn, ReferenceVarlenOps

from lengthwise.attention import AttentionNeeds, FlashCpuKernel, ReferenceKernel, check_attention, choose, choose_kernel
from lengthwise.attention.abilities import GpuAbilities
from lengthwise.attention.choose import _build, _chosen
from lengthwise.attention.cuda_kernels import FlashAttnOps
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.packs import PackKernel
from lengthwise.attention.proof import Proof
from lengthwise.attention.proof_cases import prove_kernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.errors import ConfigError
from lengthwise.models import keep_double

CPU = torch.device("cpu")


def needs(dtype=torch.float32, head_dim=16, heads=4, kv_heads=2):
    return AttentionNeeds(dtype=dtype, head_dim=head_dim, windowed=True, heads=heads, kv_heads=kv_heads)


def fault_of(kernel, needs):
    return prove_kernel(kernel, needs, CPU).fault


def by_length():
    return ByLengthKernel(DenseKernel(ReferenceDenseOps()), VarlenKernel(ReferenceVarlenOps()))


def test_a_kernel_that_leaves_a_cap_out_is_found_and_one_that_caps_passes():
    capped = replace(needs(), capped=True)
    for kernel in (ReferenceKernel(), VarlenKernel(FlashAttnOps(ReferenceFlashAttn()))):
        assert fault_of(kernel, capped) is None
    for kernel in (FlashCpuKernel(), by_length()):
        assert "causal block of 72 tokens, heads of 16, float32: out is off by" in fault_of(kernel, capped)


class Broken(VarlenKernel):
    """A right varlen kernel but for what one of these does."""

    def __init__(self, what):
        super().__init__(ReferenceVarlenOps())
        self.what = what

    def _forward(self, block, documents):
        out, lse = super()._forward(block, self._wider(documents))
        if self.what == "lse times 1.01":
            lse = lse * 1.01
        if self.what == "NaN in the last document" and len(documents.cu_seqlens_q) > 2:
            out[-3] = float("nan")
        if self.what == "raises on few rows" and len(block.q) < 16:
            raise RuntimeError("no kernel for this shape\nmore")
        return out, lse

    def _backward(self, grad_out, block, saved, documents):
        if self.what == "own lse":
            own = super()._forward(block, documents)
            saved = replace(saved, out=own[0], lse=own[1])
        dq, dk, dv = super()._backward(grad_out, block, saved, self._wider(documents))
        return dq, dk, dv

    def _wider(self, documents):
        if self.what == "window off by one" and documents.window_left is not None:
            return replace(documents, window_left=documents.window_left + 1)
        return documents


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("lse times 1.01", "causal block of 72 tokens, heads of 16, bfloat16: lse is off by 0.0"),
        ("window off by one", "tile of a window of 24 tokens, heads of 16, bfloat16: out is off by 0."),
        ("NaN in the last document", "documents of 1 to 200 tokens, heads of 16, bfloat16: out is not finite"),
        ("raises on few rows", "full block of 5 queries and 9 keys, heads of 16, bfloat16: RuntimeError: no kernel"),
        ("own lse", "causal block of 72 tokens, heads of 16, bfloat16: dq is off by"),
    ],
)
def test_a_kernel_that_is_wrong_is_found_with_the_numbers(what, named):
    fault = fault_of(Broken(what), needs(torch.bfloat16))
    assert fault is not None
    assert fault.startswith(named)
    assert "more" not in fault


def test_a_long_document_after_short_ones_is_compared_as_it_runs():
    class Wrong(DenseKernel):
        def backward(self, grad_out, block, saved):
            dq, dk, dv = super().backward(grad_out, block, saved)
            return dq, dk * (1.01 if len(block.q) > 200 else 1.0), dv  # blocks of 200 rows are right

    right, varlen = DenseKernel(ReferenceDenseOps()), VarlenKernel(ReferenceVarlenOps())
    assert fault_of(ByLengthKernel(right, varlen, diagonal_tokens=150), needs()) is None
    fault = fault_of(ByLengthKernel(Wrong(ReferenceDenseOps()), varlen, diagonal_tokens=150), needs())
    assert "document of 191 tokens after short ones, heads of 16, float32: dk is off by 0.0" in fault


class WrongOnCpu(FlashCpuKernel):
    name = "flash that is wrong"

    def backward(self, grad_out, block, saved):
        dq, dk, dv = super().backward(grad_out, block, saved)
        return dq, dk * 1.01, dv


@pytest.fixture
def wrong_flash(monkeypatch):
    choose._proof.cache_clear()
    monkeypatch.setattr(choose, "FlashCpuKernel", WrongOnCpu)
    yield
    choose._proof.cache_clear()


def test_auto_names_a_wrong_kernel_and_takes_the_next(wrong_flash):
    said = []
    kernel = choose_kernel(CPU, AttentionNeeds(head_dim=16), say=said.append)
    assert type(kernel) is ReferenceKernel
    assert [line.partition("; proved in 0.")[0] for line in said] == [
        "attention kernel: flash_cpu is not used, because it is wrong on this device: causal block of 72 tokens, "
        "heads of 16, float32: dk is off by 0.01 of its norm, but 0.0001 is allowed",
        "attention kernel: reference (matrix products); because the run computes on the CPU, and flash_cpu is wrong "
        "on it",
    ]
    with pytest.warns(UserWarning, match="flash_cpu is not used"):  # where nobody listens
        choose_kernel(CPU, AttentionNeeds(head_dim=16))


def test_a_kernel_that_is_wrong_on_one_rank_is_used_by_none(monkeypatch):
    kernels, said, here = {}, {rank: [] for rank in range(3)}, threading.local()

    def proof(name, *_):
        return Proof(fault="lse is off" if (name, here.rank) == ("flash_cpu", 1) else None)

    def on(transport):
        here.rank = rank = transport.rank
        how = {"say": said[rank].append, "transport": transport}
        kernels[rank] = type(choose_kernel(CPU, AttentionNeeds(head_dim=16), **how))

    monkeypatch.setattr(choose, "_proof", proof)
    StrictWorld(3).run(on)
    assert set(kernels.values()) == {ReferenceKernel}
    assert all("wrong on this device: rank 1: lse is off" in each[0] for each in said.values())


def test_what_the_process_computes_in_fewer_bits_may_differ_by_as_much(monkeypatch):
    class Rounded(ReferenceKernel):
        def backward(self, grad_out, block, saved):
            return tuple(each.bfloat16().float() for each in super().backward(grad_out, block, saved))

    assert "dq is off by 0.00" in fault_of(Rounded(), needs())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert fault_of(Rounded(), needs()) is None


def test_the_check_changes_nothing_of_the_process_and_is_changed_by_none_of_its_modes():
    before = torch.random.get_rng_state()
    with keep_double(torch.float64), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert fault_of(FlashCpuKernel(), needs()) is None
    assert torch.equal(before, torch.random.get_rng_state())


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
