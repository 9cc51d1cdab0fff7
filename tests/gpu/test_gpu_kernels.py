"""The chosen kernels, packs and rings against dense attention on the CPU in fp64: on a GPU, and with stand-ins on CPU.

On the CPU the varlen kernel is a reference that refuses what a GPU kernel would misread.
"""

from functools import partial

import pytest
import torch
from testing import dense_attention, make_plan, relative_error, tiny_family_config, tiny_model
from testing.attention_ranks import attend_on_ranks
from testing.mixers import STAND_INS
from testing.staged import StagedTransport
from testing.varlen import ReferenceDenseOps, ReferenceFlashAttn, ReferenceVarlenOps

from lengthwise.attention import AttentionNeeds, ReferenceKernel, choose_kernel
from lengthwise.attention.cuda_kernels import EfficientKernel, FlashAttnOps, TorchVarlenOps
from lengthwise.attention.cudnn import ByLengthKernel, CudnnOps, DenseKernel
from lengthwise.attention.kernels import FlashCpuKernel
from lengthwise.attention.proof import prove
from lengthwise.attention.proof_cases import prove_kernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.comm import SoloTransport
from lengthwise.core.packages import installed_version
from lengthwise.core.plan import Piece
from lengthwise.models import Computing, fused_layers, loss_choice
from lengthwise.models.mixer_choice import cases_of, layers_of
from lengthwise.models.mixer_kernels import CONVOLUTION, DELTA_RULE, KDA, MAMBA2, PACKAGES, package_kernel
from lengthwise.models.model_source import build_skeleton
from models.test_models_fused_layers import PlainKernels
from tiers import more, some

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
HEADS, KV_HEADS, SCALE = 8, 2, 0.11
LENGTHS = {"cuda": (700, 1, 2, 127, 128, 129, 33), "cpu": (70, 1, 2, 15, 16, 17, 5)}
PIECES = [
    [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 3, 5))],
    [Piece(ranks=(1, 0), sequences=(4, 2)), Piece(ranks=(2,), sequences=(6,))],
]
SPLIT = [
    [Piece(ranks=(0, 1, 2, 3), sequences=(0, 4), heads=2), Piece(ranks=(1,), sequences=(1, 3))],
    [Piece(ranks=(3, 2, 1, 0), sequences=(5, 2), heads=4), Piece(ranks=(2,), sequences=(6,))],
]
PLANS = {"rings": (3, PIECES), "split heads": (4, SPLIT)}

FAMILY = {DELTA_RULE: "qwen3_5_text", KDA: "kimi_linear", MAMBA2: "nemotron_h", CONVOLUTION: "lfm2"}
KEYS = {DELTA_RULE: {"linear_key_head_dim": 64, "linear_value_head_dim": 128}, KDA: {"linear_head_dim": 64}}


def named_kernel(name, device, **limits):
    """Return the kernel of a GPU, or what stands for it on the CPU."""
    on_gpu = device.type == "cuda"
    if name == "reference":
        return ReferenceKernel()
    if name == "efficient":
        return EfficientKernel() if on_gpu else FlashCpuKernel(token_multiple=128)
    if name == "flash-attn":
        there = "flash_attn.flash_attn_interface"
        package = pytest.importorskip(there, exc_type=ImportError) if on_gpu else ReferenceFlashAttn()
        return VarlenKernel(FlashAttnOps(package))
    varlen = VarlenKernel(TorchVarlenOps() if on_gpu else ReferenceVarlenOps())
    return (
        varlen
        if name == "varlen"
        else ByLengthKernel(DenseKernel(CudnnOps() if on_gpu else ReferenceDenseOps()), varlen, **limits)
    )


def draw(tokens, dtype, seed):
    """Return (q, k, v, grad_out) on the CPU, already rounded to `dtype`."""
    random = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(tokens, n, 64, generator=random).to(dtype) for n in heads]


def expected(q, k, v, grad, *, window=None, sinks=None, softcap=None):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out, _ = dense_attention(q, k, v, scale=SCALE, window=window, sinks=sinks, softcap=softcap)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def close(got, wanted, dtype):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        error = relative_error(a.cpu(), b, floor=0.05 * b.numel() ** 0.5)
        assert error < TOLERANCES[dtype], f"{name} of {len(b)} tokens: {error}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (50, False), (200, True), (1, False)])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", PLANS)
def test_gpu_rings_and_packs_equal_dense(device, kind, dtype, window, with_sinks, staged):
    """Ranks as threads on one device: the strict transport copies there; staged, all goes through host memory."""
    packs = device.type == "cpu" and dtype == torch.bfloat16  # no kernel that is chosen there takes any
    kernel = (
        named_kernel("varlen", device) if packs else choose_kernel(device, AttentionNeeds(dtype=dtype, head_dim=64))
    )
    lengths, (ranks, pieces) = LENGTHS[device.type], PLANS[kind]
    plan = make_plan(ranks, lengths, pieces)
    rows = [draw(length, dtype, i) for i, length in enumerate(lengths)]
    sinks = torch.linspace(-2, 2, HEADS) if with_sinks else None
    there = None if sinks is None else sinks.to(device, dtype)

    def around(transport):
        return StagedTransport(transport, stages=lambda _: True) if staged else transport

    how = {"scale": SCALE, "window": window, "sinks": there, "device": device, "around": around}
    whole, _ = attend_on_ranks(plan, rows, kernel, **how)
    for row, got in zip(rows, whole, strict=True):
        close(got, expected(*row, window=window, sinks=None if sinks is None else sinks.to(dtype).double()), dtype)


@pytest.mark.parametrize(("kind", "window"), [("rings", 50), more("rings", None), more("split heads", 50)])
def test_gpu_rings_and_packs_of_capped_scores_equal_dense(device, kind, window):
    """Which kernel a model with capped scores gets where flash-attn is installed."""
    kernel, dtype = named_kernel("flash-attn", device), torch.float64 if device.type == "cpu" else torch.bfloat16
    lengths, (ranks, pieces) = LENGTHS[device.type], PLANS[kind]
    rows = [draw(length, dtype, i) for i, length in enumerate(lengths)]
    how = {"scale": SCALE, "window": window, "softcap": 0.7}
    whole, _ = attend_on_ranks(make_plan(ranks, lengths, pieces), rows, kernel, device=device, **how)
    for row, got in zip(rows, whole, strict=True):
        close(got, expected(*row, window=window, softcap=0.7), dtype)


@pytest.mark.parametrize("window", [None, 50])
def test_gpu_packs_of_long_and_short_documents_equal_dense(device, window):
    """The long one is alone in its call, between others."""
    lengths, dtype = LENGTHS[device.type], torch.float64 if device.type == "cpu" else torch.bfloat16
    kernel = named_kernel("cudnn", device, diagonal_tokens=lengths[0] // 2)
    rows = [draw(length, dtype, i) for i, length in enumerate(lengths)]
    plan = make_plan(1, lengths, [Piece(ranks=(0,), sequences=(3, 1, 0, 2, 4, 5, 6))])
    whole, _ = attend_on_ranks(plan, rows, kernel, scale=SCALE, window=window, device=device)
    for row, got in zip(rows, whole, strict=True):
        close(got, expected(*row, window=window), dtype)


def test_gpu_kernel_for_bf16_takes_packs_and_says_why(device):
    said = []
    kernel = choose_kernel(device, AttentionNeeds(dtype=torch.bfloat16, head_dim=128), say=said.append)
    assert kernel.token_multiple == (128 if device.type == "cuda" else 1)
    assert said[0].startswith("attention kernel: ")
    if device.type == "cpu":
        return
    if torch.cuda.get_device_capability() >= (8, 0) and torch.backends.cuda.is_flash_attention_available():
        assert isinstance(kernel, VarlenKernel | ByLengthKernel)


@pytest.mark.parametrize("name", some(["varlen", "efficient", "cudnn", "reference", "flash-attn"], 2))
def test_gpu_kernels_pass_the_comparison_of_a_start(device, name):
    """Blocks, tiles of windows and documents, under the log-sum-exp of more keys than a block's."""
    kernel, shape = named_kernel(name, device), {"heads": HEADS, "kv_heads": KV_HEADS, "windowed": True}
    for dim in (64, 128) if device.type == "cuda" else (64,):
        needs = AttentionNeeds(dtype=torch.bfloat16, head_dim=dim, capped=name == "flash-attn", **shape)
        assert prove_kernel(kernel, needs, device).fault is None


@pytest.mark.parametrize("dtype", some(TOLERANCES, -1), ids=str)
def test_gpu_kernels_that_are_chosen_pass_it_with_heads_of_any_size(device, dtype):
    for dim in (20, 64, 256):
        needs = AttentionNeeds(dtype=dtype, head_dim=dim, windowed=True, heads=HEADS, kv_heads=KV_HEADS)
        kernel = choose_kernel(device, AttentionNeeds(dtype=dtype, head_dim=dim))
        assert prove_kernel(kernel, needs, device).fault is None


@pytest.mark.parametrize("name", some(PACKAGES))
def test_gpu_packages_of_layers_with_states_pass_the_comparison_of_a_start(device, name):
    model = build_skeleton(tiny_family_config(FAMILY[name], KEYS.get(name)))
    (layer,), dtype = layers_of(model), torch.bfloat16
    kernel = package_kernel(PACKAGES[name], [layer], dtype)
    if device.type == "cpu":
        kernel = PACKAGES[name].make(STAND_INS[name])
    elif isinstance(kernel, str):
        pytest.skip(kernel)
    assert prove(cases_of(name, kernel, model, dtype, device), dtype, device).fault is None


@pytest.mark.parametrize("family", ["llama", more("gemma3_text"), more("olmo2"), more("qwen3")])
def test_gpu_layers_of_liger_pass_the_comparison_of_a_start(device, family, monkeypatch):
    version = installed_version("liger-kernel")
    if device.type == "cpu":
        version = "0.8.5"
        monkeypatch.setattr(fused_layers, "liger_functions", PlainKernels)
    elif version is None:
        pytest.skip("liger-kernel is not installed")
    model, how = tiny_model(family), {"dtype": torch.bfloat16, "on_gpu": True, "compiled": False, "liger": version}
    _, said = fused_layers.choose_forwards(model, "liger", fused_layers.FusedNeeds(family=family, **how), device)
    assert said.startswith("liger (")


def test_gpu_loss_in_one_pass_passes_the_comparison_of_a_start(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(loss_choice, "compiled_losses", partial(loss_choice.compiled_losses, backend="eager"))
    how, said = {"dtype": torch.bfloat16, "computing": Computing(compile=True)}, []
    loss_choice.choose_losses(tiny_model("llama"), SoloTransport(), device, **how, say=said.append)
    assert said[0].startswith("loss: compiled to one pass"), said
