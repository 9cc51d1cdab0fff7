"""GPU kernels without a GPU: what they are handed, which is chosen and why, and that a pack is one call."""

import pytest
import torch
from testing import make_plan
from testing.strict import StrictWorld
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention import Block, PlannedAttention, ReferenceKernel, Saved, planned_attention
from lengthwise.attention.cuda_kernels import EfficientKernel
from lengthwise.attention.kernels import BlockMask
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
from lengthwise.program import lower_plan


def draw(tokens, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    random = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, n, dim, generator=random, dtype=torch.float64).to(dtype) for n in (heads, kv_heads, 2)]


@pytest.mark.parametrize("window", [None, 5])
def test_a_pack_is_one_call_a_layer_and_pass_and_so_are_the_diagonals_of_rings(window):
    """Thirty documents and the diagonal of a ring on each rank, and one call more for each block that is not on it."""
    pieces = [Piece(ranks=(0,), sequences=tuple(range(1, 31))), Piece(ranks=(0, 1), sequences=(0,))]
    plan = make_plan(2, [40, *range(1, 31)], [pieces])

    def work(transport):
        (program,) = lower_plan(plan, transport.rank)
        ops = ReferenceVarlenOps()
        planned = PlannedAttention(program, transport, VarlenKernel(ops))
        q, k, v = (x.requires_grad_() for x in draw(planned.num_tokens))
        out = planned_attention(q, k, v, planned, scale=0.3, window=window)
        forward = ops.calls
        out.sum().backward()
        windowed = program.with_window(window)
        others = sum(
            not t.causal for ring_step in range(windowed.ring_steps) for t in windowed.tasks(transport.rank, ring_step)
        )
        return forward, ops.calls - forward, 1 + others

    for forward, backward, expected in StrictWorld(2).run(work):
        assert forward == backward == expected


@pytest.mark.parametrize("strange", ["odd stride", "odd start", "head_dim first", "expanded"])
def test_varlen_kernel_makes_operands_readable(strange):
    """Rows off the 16-byte borders, or gaps inside a head, are copied; the reference refuses them."""
    q, k, v = draw(9)
    plain = VarlenKernel(ReferenceVarlenOps()).forward(Block(q=q, k=k, v=v, causal=True, scale=0.3))[0]
    if strange == "odd stride":
        q = torch.cat((q, q[..., :1]), dim=-1)[..., :8]
    elif strange == "odd start":
        q = torch.cat((q.flatten()[:1], q.flatten()))[1:].view(q.shape)
    elif strange == "head_dim first":
        q = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    ops = ReferenceVarlenOps()
    out, lse = VarlenKernel(ops).forward(Block(q=q, k=k, v=v, causal=True, scale=0.3))
    assert torch.equal(out, plain)
    grad = torch.ones((), dtype=torch.float64).expand(9, 4, 8) if strange == "expanded" else torch.ones_like(out)
    wide_lse = torch.cat((lse, lse), dim=1)[:, :9]  # some columns of a larger one, as a ring's blocks have it
    VarlenKernel(ops).backward(grad, Block(q=q, k=k, v=v, causal=True, scale=0.3), Saved(out=out, lse=wide_lse))


def test_efficient_kernel_hands_masked_blocks_to_the_reference():
    q, k, v = draw(9)
    mask = BlockMask(queries=9, keys=9, distance=0, causal=True, window=3)
    block = Block(q=q, k=k, v=v, causal=True, scale=0.3, mask=mask)
    out, lse = EfficientKernel().forward(block)
    assert torch.equal(out, ReferenceKernel().forward(block)[0])
    grads, expected = (
        kernel.backward(out, block, Saved(out=out, lse=lse)) for kernel in (EfficientKernel(), ReferenceKernel())
    )
    assert all(map(torch.equal, grads, expected))
