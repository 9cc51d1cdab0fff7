"""Kernels that are wrong on purpose are found, named and not used; right ones pass."""

import threading
from dataclasses import replace

import pytest
import torch
from testing.strict import StrictWorld
from testing.varlen import ReferenceDenseOps, ReferenceFlashAttn, ReferenceVarlenOps

from lengthwise.attention import AttentionNeeds, FlashCpuKernel, ReferenceKernel, choose, choose_kernel
from lengthwise.attention.cuda_kernels import FlashAttnOps
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.proof import Proof
from lengthwise.attention.proof_cases import prove_kernel
from lengthwise.attention.varlen import VarlenKernel
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
