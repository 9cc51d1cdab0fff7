"""Rows of padding after a rank's tokens are in nothing that tokens get; a pack's gradients are not copied."""

import pytest
import torch
from testing import make_plan
from testing.strict import StrictWorld
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps

from lengthwise.attention import Block, FlashCpuKernel, PlannedAttention
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.packs import PackKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
from lengthwise.program import lower_plan

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
LENGTHS = (13, 1, 2, 9, 30, 5)
PLANS = {
    "rings and packs": [
        [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 3))],
        [Piece(ranks=(2, 1, 0), sequences=(1,)), Piece(ranks=(0,), sequences=(2,))],  # ranks of a ring without a token
        [Piece(ranks=(2,), sequences=(4, 5, 2))],
    ],
    "split heads": [
        [Piece(ranks=(0, 1), sequences=(0, 4), heads=2), Piece(ranks=(1,), sequences=(1, 3))],
        [Piece(ranks=(1, 2), sequences=(5,), heads=2), Piece(ranks=(0,), sequences=(2,))],
    ],
}
PACKS = VarlenKernel(ReferenceVarlenOps(), token_multiple=1)
KERNELS = {
    "block by block": FlashCpuKernel(),
    "packs": PACKS,
    "packs by length": ByLengthKernel(DenseKernel(ReferenceDenseOps()), PACKS, diagonal_tokens=9, full_tokens=4),
}


def passes(transport, plan, kernel, window, padding):
    """Return (out, dq, dk, dv) of each microbatch of this rank; rows of padding hold large numbers."""
    found = []
    for program in lower_plan(plan, transport.rank):
        planned = PlannedAttention(program, transport, kernel)
        random = torch.Generator().manual_seed(program.index * 7 + transport.rank)
        tokens = planned.num_tokens
        shapes = [(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        q, k, v, grad = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
        q, k, v = (torch.cat([x, torch.full((padding, *x.shape[1:]), 50.0, dtype=x.dtype)]) for x in (q, k, v))
        grad = torch.cat([grad, torch.zeros(padding, *grad.shape[1:], dtype=grad.dtype)])
        sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
        out, attended = planned.forward(Block(q=q, k=k, v=v, scale=SCALE), window, sinks)
        grads = planned.backward(grad, attended, (HEADS, KV_HEADS, KV_HEADS), window, sinks)
        assert out.isfinite().all()
        assert isinstance(kernel, PackKernel) or not out[tokens:].any(), "what no block writes is not left undefined"
        assert all(not each[tokens:].any() for each in grads[:3]), "gradients of padding"
        found.append((out[:tokens], *(each[:tokens] for each in grads[:3]), grads[3]))
    return found


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
@pytest.mark.parametrize("rows", PLANS.values(), ids=list(PLANS))
def test_padding_is_in_nothing(rows, kernel, window):
    plan = make_plan(3, LENGTHS, rows)
    without, padded = (
        StrictWorld(3).run(lambda t, n=padding: passes(t, plan, kernel, window, n)) for padding in (0, 3)
    )
    for mine, others in zip(without, padded, strict=True):
        for tensors, same in zip(mine, others, strict=True):
            for one, other in zip(tensors, same, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-14)
