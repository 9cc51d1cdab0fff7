"""One block and its merge: equal to the textbook in every dtype, and exact however the keys are cut."""

import itertools

import pytest
import torch
from testing import dense_attention, relative_error, rounding_floor
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention import Block, FlashCpuKernel, ReferenceKernel, Saved
from lengthwise.attention.kernels import merge_block
from lengthwise.attention.varlen import VarlenKernel

KERNELS = (FlashCpuKernel(), ReferenceKernel(), VarlenKernel(ReferenceVarlenOps()))
TOLERANCES = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2}
BLOCKS = ((1, 1, True), (7, 7, True), (64, 64, True), (5, 13, False), (13, 5, False), (1, 9, False), (33, 1, False))


LAYOUTS = {  # order in memory, seen from (tokens, heads, head_dim)
    "tokens first": (0, 1, 2),
    "heads first": (1, 0, 2),
    "head_dim before tokens": (1, 2, 0),
}


def draw(q_len, kv_len, heads, kv_heads, dtype, *, layout="tokens first", dim=8):
    """Make q, k, v, grad_out: every other token, the first heads and an odd start of larger tensors, in a layout."""
    random = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 2 * max(q_len, kv_len), heads + 1, dim + 1, generator=random, dtype=torch.float64).to(dtype)
    order = LAYOUTS[layout]
    back = [order.index(axis) for axis in range(3)]
    q, k, v, g = (x.permute(order).contiguous().permute(back)[::2, :, 1:] for x in wide)
    return q[:q_len, :heads], k[:kv_len, :kv_heads], v[:kv_len, :kv_heads], g[:q_len, :heads]


def expected(q, k, v, g, **how):
    q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, **how)
    return (out, lse, *torch.autograd.grad(out, (q, k, v), g.double()))


def both(kernel, q, k, v, g, **how):
    """Return (out, lse, dq, dk, dv)."""
    block = Block(q=q, k=k, v=v, **how)
    out, lse = kernel.forward(block)
    return (out, lse, *kernel.backward(g, block, Saved(out=out, lse=lse)))


def check(kernel, given, plain, **how):
    """Compare both passes on `given` with autograd through dense attention in fp64 on `plain`."""
    found, wanted, dtype = both(kernel, *given, scale=0.3, **how), expected(*plain, scale=0.3, **how), given[0].dtype
    assert (found[0].dtype, found[1].dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    # With one key the softmax is 1 whatever q and k are: their gradients are rounding, so the floor.
    least = 0.0 if dtype == torch.float64 else rounding_floor(*wanted[2:])
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        error = relative_error(got, want, floor=max(least, 0.1 * got.numel() ** 0.5))
        assert error < TOLERANCES[dtype], f"{name} of {len(given[0])} x {len(given[1])}, {how}: {error}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_kernel_equals_dense_autograd(kernel, dtype):
    for (q_len, kv_len, causal), groups in itertools.product(BLOCKS, (1, 2, 4)):
        given = draw(q_len, kv_len, 4, 4 // groups, dtype)
        check(kernel, given, given, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_scores_are_capped_as_autograd_has_it(dtype):
    for (q_len, kv_len, causal), softcap in itertools.product(BLOCKS, (0.2, 5.0)):
        given = draw(q_len, kv_len, 4, 2, dtype)
        check(ReferenceKernel(most_scores=64), given, given, causal=causal, softcap=softcap)  # some rows at a time


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded gradient"])
def test_kernel_reads_any_layout_of_memory(kernel, layout):
    """The expanded gradient is what `out.sum().backward()` hands down: one number, seen through strides of zero."""
    for q_len, kv_len, causal in BLOCKS:
        plain = draw(q_len, kv_len, 4, 2, torch.float64)
        if layout == "expanded gradient":
            plain = given = (*plain[:3], torch.ones((), dtype=torch.float64).expand(q_len, 4, 8))
        else:
            given = draw(q_len, kv_len, 4, 2, torch.float64, layout=layout)
        check(kernel, given, plain, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_merge_does_not_overflow(dtype):
    """Section 7: exp overflow in the merge. Log-sum-exps of +-1e4 are far beyond what exp can take."""
    for low, high in ((-1e4, 1e4), (1e4, -1e4), (1e4, 1e4), (-1e4, -1e4), (1e4, 1e4 - 1), (0.0, 800.0)):
        out, lse = torch.full((1, 1, 2), 3.0, dtype=dtype), torch.full((1, 1), low, dtype=dtype)
        merge_block(out, lse, torch.full((1, 1, 2), 5.0, dtype=dtype), torch.full((1, 1), high, dtype=dtype))
        weights = torch.softmax(torch.tensor([low, high], dtype=torch.float64), 0)
        assert torch.allclose(out.double(), weights @ torch.tensor([3.0, 5.0], dtype=torch.float64), rtol=1e-6)
        want = torch.logsumexp(torch.tensor([low, high], dtype=torch.float64), 0)
        assert torch.allclose(lse.double(), want, rtol=1e-6)
