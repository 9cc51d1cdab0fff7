"""GPU kernels without a GPU: how many calls a step makes, and what joined and masked blocks give."""

from dataclasses import replace
from functools import partial

import torch
from testing import make_plan
from testing.strict import StrictWorld
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import Block, PlannedAttention, ReferenceKernel, Saved
from lengthwise.attention.cuda_kernels import EfficientKernel
from lengthwise.attention.kernels import BlockMask
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
