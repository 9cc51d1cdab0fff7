"""The chosen kernels, packs and rings against dense attention on the CPU in fp64: on a GPU, and with stand-ins on CPU.

On the CPU the varlen kernel is a reference that refuses what a GPU kernel would misread.
"""

import pytest
import torch
from testing import dense_attention, make_plan, relative_error
from testing.attention_ranks import attend_on_ranks
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps

from lengthwise.attention import AttentionNeeds, Block, ReferenceKernel, Saved, choose_kernel
from lengthwise.attention.cuda_kernels import EfficientKernel, TorchVarlenOps
from lengthwise.attention.cudnn import ByLengthKernel, CudnnOps, DenseKernel
from lengthwise.attention.kernels import BlockMask, FlashCpuKernel
from lengthwise.attention.proof import fault_of
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.comm import StagedTransport
from lengthwise.core.plan import Piece

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


def named_kernel(name, device):
    """Return the kernel of a GPU, or what stands for it on the CPU."""
    if name == "varlen":
        return VarlenKernel(TorchVarlenOps() if device.type == "cuda" else ReferenceVarlenOps())
    return EfficientKernel() if device.type == "cuda" else FlashCpuKernel(token_multiple=128)


def draw(tokens, dtype, *, dim=64, seed=0):
    """Return (q, k, v, grad_out) on the CPU, already rounded to `dtype`."""
    random = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(tokens, n, dim, generator=random).to(dtype) for n in heads]


def expected(q, k, v, grad, *, window=None, sinks=None):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out, _ = dense_attention(q, k, v, scale=SCALE, window=window, sinks=sinks)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def close(got, wanted, dtype):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        error = relative_error(a.cpu(), b, floor=0.05 * b.numel() ** 0.5)
        assert error < TOLERANCES[dtype], f"{name} of {len(b)} tokens: {error}"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dim", [64, 20, 128, 256])
def test_gpu_blocks_equal_dense(device, dtype, dim):
    kernel = choose_kernel(device, dtype=dtype, head_dim=dim)
    for tokens in (1, 7, 128, 300):
        rows = draw(tokens, dtype, dim=dim)
        q, k, v, grad = (x.to(device) for x in rows)
        out, lse = kernel.forward(Block(q=q, k=k, v=v, causal=True, scale=SCALE))
        grads = kernel.backward(grad, Block(q=q, k=k, v=v, causal=True, scale=SCALE), Saved(out=out, lse=lse))
        assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
        close((out, *grads), expected(*rows), dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["varlen", "efficient"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 200), (200, 1), (130, 64), (64, 130)])
def test_gpu_blocks_give_their_share_under_the_lse_of_all_keys(device, name, queries, keys):
    """A full block with out and lse from more keys than its own, as in a ring; the reference says what is right."""
    dtype = torch.bfloat16
    q, _, _, grad = draw(queries, dtype)
    _, k, v, _ = draw(keys + 50, dtype, seed=1)
    reference = ReferenceKernel()
    out, lse = reference.forward(Block(q=q, k=k, v=v, causal=False, scale=SCALE))
    k, v = k[:keys], v[:keys]
    wanted = reference.backward(grad, Block(q=q, k=k, v=v, causal=False, scale=SCALE), Saved(out=out, lse=lse))
    q, k, v, grad, out, lse = (x.to(device) for x in (q, k, v, grad, out, lse))
    kernel = named_kernel(name, device)
    got = kernel.backward(grad, Block(q=q, k=k, v=v, causal=False, scale=SCALE), Saved(out=out, lse=lse))
    for part, a, b in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert relative_error(a.cpu(), b, floor=0.05 * b.numel() ** 0.5) < 2e-2, part


@pytest.mark.parametrize(("queries", "keys", "distance", "window"), [(30, 64, 64, 95), (5, 64, 300, 302), (1, 9, 9, 4)])
def test_gpu_window_edges_are_where_the_mask_says(device, queries, keys, distance, window):
    dtype = torch.bfloat16
    q, _, _, grad = draw(queries, dtype)
    _, k, v, _ = draw(keys, dtype, seed=1)
    mask = BlockMask(queries=queries, keys=keys, distance=distance, causal=False, window=window)
    results = []
    for kernel, there in ((ReferenceKernel(), torch.device("cpu")), (named_kernel("varlen", device), device)):
        a, b, c, d = (x.to(there) for x in (q, k, v, grad))
        own = BlockMask(queries=queries, keys=keys, distance=distance, causal=False, window=window)
        out, lse = kernel.forward(Block(q=a, k=b, v=c, causal=False, scale=SCALE, mask=own))
        results.append(
            (
                out,
                lse,
                *kernel.backward(d, Block(q=a, k=b, v=c, causal=False, scale=SCALE, mask=own), Saved(out=out, lse=lse)),
            )
        )
    assert mask.window_left is not None
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert relative_error(b.cpu(), a, floor=0.05 * a.numel() ** 0.5) < 2e-2, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (50, False), (200, True), (1, False)])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", PLANS)
def test_gpu_rings_and_packs_equal_dense(device, kind, dtype, window, with_sinks, staged):
    """Ranks as threads on one device: the strict transport copies there; staged, all goes through host memory."""
    packs = device.type == "cpu" and dtype == torch.bfloat16  # no kernel that is chosen there takes any
    kernel = named_kernel("varlen", device) if packs else choose_kernel(device, dtype=dtype, head_dim=64)
    lengths, (ranks, pieces) = LENGTHS[device.type], PLANS[kind]
    plan = make_plan(ranks, lengths, pieces)
    rows = [draw(length, dtype, seed=i) for i, length in enumerate(lengths)]
    sinks = torch.linspace(-2, 2, HEADS) if with_sinks else None
    there = None if sinks is None else sinks.to(device, dtype)

    def around(transport):
        return StagedTransport(transport, stages=lambda _: True) if staged else transport

    whole = attend_on_ranks(plan, rows, kernel, scale=SCALE, window=window, sinks=there, device=device, around=around)
    for row, got in zip(rows, whole, strict=True):
        close(got, expected(*row, window=window, sinks=None if sinks is None else sinks.to(dtype).double()), dtype)


def test_gpu_kernel_for_bf16_takes_packs_and_says_why(device):
    said = []
    kernel = choose_kernel(device, dtype=torch.bfloat16, head_dim=128, say=said.append)
    assert kernel.token_multiple == (128 if device.type == "cuda" else 1)
    assert said[0].startswith("attention kernel: ")
    if device.type == "cpu":
        return
    if torch.cuda.get_device_capability() >= (8, 0) and torch.backends.cuda.is_flash_attention_available():
        assert isinstance(kernel, VarlenKernel)


@pytest.mark.parametrize("name", ["varlen", "efficient", "cudnn", "reference"])
@pytest.mark.parametrize("dim", [64, 128])
def test_gpu_kernels_pass_the_comparison_of_a_start(device, name, dim):
    needs = AttentionNeeds(dtype=torch.bfloat16, head_dim=dim, windowed=True, heads=8, kv_heads=2)
    if name == "cudnn":
        ops = CudnnOps() if device.type == "cuda" else ReferenceDenseOps()
        kernel = ByLengthKernel(DenseKernel(ops), named_kernel("varlen", device))
    else:
        kernel = ReferenceKernel() if name == "reference" else named_kernel(name, device)
    assert fault_of(kernel, needs, device) is None
