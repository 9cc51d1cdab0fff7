"""GPU kernels without a GPU: how many calls a step makes, joined, masked and long blocks."""

from dataclasses import replace
from functools import partial

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from testing import make_plan, relative_error
from testing.strict import StrictWorld
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import Block, PlannedAttention, ReferenceKernel, Saved
from lengthwise.attention.cuda_kernels import EfficientKernel
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.kernels import BlockMask
from lengthwise.attention.packs import PackKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
from lengthwise.program import lower_plan


def draw(tokens, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    random = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, n, dim, generator=random, dtype=torch.float64).to(dtype) for n in (heads, kv_heads, 2)]


class NoOps:
    """Raw calls that compute nothing; `calls` lists their numbers of documents."""

    name, caps_scores = "none", False

    def __init__(self):
        self.calls = []

    def forward(self, block, documents):
        self.calls.append(len(documents.cu_seqlens_q) - 1)
        return block.q, block.q.new_zeros(block.q.shape[1::-1])

    def backward(self, grad_out, block, saved, documents):
        self.calls.append(len(documents.cu_seqlens_q) - 1)
        return block.q, block.k, block.v


def answers(count, prompts=1):
    """Prompts and the answers to them on one ring of four ranks."""
    lengths, parents = [], []
    for _ in range(prompts):
        parents += [None, *[len(parents)] * count]
        lengths += [60, *[24 + each % 5 for each in range(count)]]
    plan = make_plan(4, lengths, [Piece(ranks=(0, 1, 3, 2), sequences=tuple(range(len(lengths))))])
    return replace(plan, parents=tuple(parents))


def test_calls_and_operations_of_a_ring_step_do_not_grow_with_sequences():
    """One call for what each sequence sees of itself, one for what answers see of their prompts."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, _types, arguments=(), named=None):
            self.number += 1
            return function(*arguments, **(named or {}))

    def work(transport, plan):
        (program,) = lower_plan(plan, transport.rank)
        ops = NoOps()
        planned = PlannedAttention(program, transport, VarlenKernel(ops))
        q, k, v = draw(planned.num_rows)
        planned.lower([None], q.device)
        with torch.no_grad(), Count() as count:
            out, attended = planned.forward(Block(q=q, k=k, v=v, scale=0.3))
            planned.backward(out, attended, (4, 2, 2))
        return len(ops.calls), count.number

    few, many, more_prompts = (
        StrictWorld(4).run(partial(work, plan=plan)) for plan in (answers(3), answers(16), answers(3, prompts=8))
    )
    for (calls, operations), *others in zip(few, many, more_prompts, strict=True):
        assert calls <= 2 * (1 + 2 * 4)
        assert all(other == calls and number <= 1.2 * operations for other, number in others)


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


CPU = torch.device("cpu")


def draw_heads(tokens, heads=(4, 2, 2, 4), dim=8, seed=3):
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
    q, k, v, grad = draw_heads(tokens, heads, dim=dim)
    earlier = draw_heads(7, heads, dim=dim, seed=4)
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
        q, k = draw_heads(queries)[0], draw_heads(keys)
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
