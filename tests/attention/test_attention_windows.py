"""Sliding windows and attention sinks over rings and packs equal dense attention of whole documents."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import dense_attention, draw_lengths, make_plan, random_plan, relative_error, rounding_floor
from testing.strict import StrictWorld
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention import FlashCpuKernel, PlannedAttention, ReferenceKernel, planned_attention
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
from lengthwise.program import lower_plan
from properties import costly

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 4, 0.4
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def draw(lengths, dtype):
    random = torch.Generator().manual_seed(5)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM))
    return [[torch.randn(n, *s, generator=random, dtype=torch.float64).to(dtype) for s in shapes] for n in lengths]


def largest_error(plan, rows, sinks, window, kernel):
    """Run all ranks; return the largest relative error of out, dq, dk, dv of any sequence, and of the sinks."""
    found = [[torch.zeros_like(row[n]) for n in (0, 0, 1, 2)] for row in rows]

    def work(transport):
        total = None if sinks is None else torch.zeros_like(sinks)
        for program in lower_plan(plan, transport.rank):
            segments = program.segments(transport.rank)
            *leaves, grad = (torch.cat([rows[s.sequence][n][s.start : s.stop] for s in segments]) for n in range(4))
            leaves = [leaf.requires_grad_() for leaf in leaves]
            mine = [] if sinks is None else [sinks.clone().requires_grad_()]
            planned = PlannedAttention(program, transport, kernel)
            out = planned_attention(*leaves, planned, scale=SCALE, window=window, sinks=mine[0] if mine else None)
            grads = torch.autograd.grad(out, [*leaves, *mine], grad)
            if total is not None:
                total += grads[3]
            start = 0
            for s in segments:
                for into, part in zip(found[s.sequence], (out.detach(), *grads[:3]), strict=True):
                    into[s.start : s.stop] += part[start : start + s.num_tokens]
                start += s.num_tokens
        return total

    totals = StrictWorld(plan.ranks).run(work)
    errors, sink_grad = [], torch.zeros(HEADS, dtype=torch.float64)
    for row, mine in zip(rows, found, strict=True):
        q, k, v = (x.double().requires_grad_() for x in row[:3])
        wide = None if sinks is None else sinks.double().requires_grad_()
        out, _ = dense_attention(q, k, v, scale=SCALE, window=window, sinks=wide)
        grads = torch.autograd.grad(out, [q, k, v, *([] if wide is None else [wide])], row[3].double())
        least = 0.0 if q.dtype == row[0].dtype else rounding_floor(*grads[:3])  # zero where a query sees one key
        floor = max(least, 1e-2 * len(q) ** 0.5)
        errors += [relative_error(a, b, floor=floor) for a, b in zip(mine, (out.detach(), *grads[:3]), strict=True)]
        if wide is not None:
            sink_grad += grads[3]
    if sinks is not None:
        errors.append(relative_error(sum(totals), sink_grad, floor=1e-2))
    return max(errors)


@costly
@given(
    choose=st.randoms(use_true_random=False),
    ranks=st.sampled_from([1, 2, 3, 5, 7]),
    count=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 45)),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    packs=st.booleans(),
)
def test_windows_and_sinks_equal_dense_under_any_plan(choose, ranks, count, window, with_sinks, dtype, packs):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    sinks = torch.tensor([0.5, -3.0, 2.0, 0.0], dtype=dtype) if with_sinks else None
    kernel = VarlenKernel(ReferenceVarlenOps()) if packs else FlashCpuKernel()
    assert largest_error(plan, draw(plan.tokens, dtype), sinks, window, kernel) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    "kernel",
    [FlashCpuKernel(), ReferenceKernel(), VarlenKernel(ReferenceVarlenOps())],
    ids=lambda kernel: type(kernel).__name__,
)
@pytest.mark.parametrize("window", [1, 60, 128, 150, 400])
def test_windows_equal_dense_in_tiles_and_over_chunk_borders(kernel, window):
    pieces = [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 2))]
    plan = make_plan(3, [700, 301, 40], pieces)
    sinks = torch.tensor([1.0, 0.0, -1.0, 30.0], dtype=torch.float64)
    assert largest_error(plan, draw(plan.tokens, torch.float64), sinks, window, kernel) < 1e-12


def test_sinks_of_any_size_do_not_overflow():
    plan = make_plan(2, [30], [Piece(ranks=(0, 1), sequences=(0,))])
    sinks = torch.tensor([1e4, -1e4, 700.0, -700.0], dtype=torch.float64)
    assert largest_error(plan, draw(plan.tokens, torch.float64), sinks, 7, FlashCpuKernel()) < 1e-12
