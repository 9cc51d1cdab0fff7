"""cuDNN for long blocks on the CPU: where it is taken, and values through a strict reference."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from testing import relative_error
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps

from lengthwise.attention import Block, ReferenceKernel, Saved
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.kernels import BlockMask
from lengthwise.attention.packs import PackKernel
from lengthwise.attention.varlen import VarlenKernel

CPU = torch.device("cpu")


def draw(tokens, heads=(4, 2, 2, 4), dim=8, seed=3):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, n, dim, generator=random, dtype=torch.float64) for n in heads]


def by_length(**limits):
    dense, varlen = ReferenceDenseOps(), ReferenceVarlenOps()
    return ByLengthKernel(DenseKernel(dense), VarlenKernel(varlen), **limits), dense, varlen


@example(tokens=256, dim=8, heads_first=True)
@given(tokens=st.integers(1, 300), dim=st.sampled_from([5, 8]), heads_first=st.booleans())
def test_a_padded_causal_block_gives_what_the_block_gives(tokens, dim, heads_first):
    """Under out and lse of more keys than its own, as in a ring; operands with gaps are handed over without."""
    heads = (2, 1, 1, 2)
    q, k, v, grad = draw(tokens, heads, dim=dim)
    earlier = draw(7, heads, dim=dim, seed=4)
    reference, dense = ReferenceKernel(), ReferenceDenseOps()
    kernel = DenseKernel(dense)
    block = Block(q=q, k=k, v=v, scale=0.3)
    wanted = reference.forward(block)
    out, lse = reference.forward(
        Block(q=q, k=torch.cat((k, earlier[1])), v=torch.cat((v, earlier[2])), scale=0.3, causal=False)
    )
    expected = (*wanted, *reference.backward(grad, block, Saved(out=out, lse=lse)))
    if heads_first:
        q, k, v, grad = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, grad))
        lse = torch.cat((lse, lse), dim=1)[:, :tokens]
    block = Block(q=q, k=k, v=v, scale=0.3)
    got = (*kernel.forward(block), *kernel.backward(grad, block, Saved(out=out, lse=lse)))
    assert all(a.shape == b.shape and relative_error(a, b) < 1e-12 for a, b in zip(got, expected, strict=True))
    assert dense.shapes == [(-(-tokens // 256) * 256,) * 2 + (True,)] * 2


def test_long_blocks_go_to_one_kernel_and_all_others_to_the_other():
    kernel, dense, _ = by_length(diagonal_tokens=8, full_tokens=16)
    assert isinstance(kernel, PackKernel)
    assert (kernel.name, kernel.token_multiple) == ("reference dense from 8 tokens of one document on, else "
                                                    "reference varlen", 128)  # fmt: skip

    def where(queries, keys, causal, mask=None):
        before = len(dense.shapes)
        q, k = draw(queries)[0], draw(keys)
        block = Block(q=q, k=k[1], v=k[2], scale=0.3, causal=causal, mask=mask)
        out, lse = kernel.forward(block)
        kernel.backward(out, block, Saved(out=out, lse=lse))
        return ["rest", "long"][(len(dense.shapes) - before) // 2]

    assert where(8, 8, True) == "long"
    assert where(7, 7, True) == "rest"
    assert where(16, 17, False) == "long"
    assert where(15, 64, False) == where(64, 15, False) == "rest"
    mask = BlockMask(queries=20, keys=20, distance=0, causal=True, window=9)
    assert where(20, 20, True, mask) == "rest"
    assert kernel.alone_from == 8
    torch.use_deterministic_algorithms(True)
    try:
        assert where(8, 8, True) == "rest"
        assert kernel.alone_from is None
    finally:
        torch.use_deterministic_algorithms(False)
