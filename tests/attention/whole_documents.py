"""Attention of all ranks put together again, compared with each document alone in one process, in fp64."""

import torch
from testing import dense_attention, relative_error, rounding_floor
from testing.order import check_order
from testing.strict import StrictWorld

from lengthwise.attention import FlashCpuKernel, PlannedAttention, planned_attention
from lengthwise.program import lower_plan

DIM, SCALE = 4, 0.4
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
NAMES = ("out", "dq", "dk", "dv")


def documents(lengths, dtype=torch.float64, *, heads=4, kv_heads=2, seed=0, spread=1.0):
    """Draw (q, k, v, grad_out) of each sequence; a sequence's values depend on its index and length only."""
    rows = []
    for i, length in enumerate(lengths):
        random = torch.Generator().manual_seed(1000 * seed + i)
        shapes = [(length, number, DIM) for number in (heads, kv_heads, kv_heads, heads)]
        rows.append([(torch.randn(s, generator=random, dtype=torch.float64) * spread).to(dtype) for s in shapes])
    return rows


def dense(row, *, window=None, sinks=None):
    """Return [out, dq, dk, dv] of one sequence alone in fp64, and the gradient of the sinks where there are any."""
    q, k, v = (x.double().requires_grad_() for x in row[:3])
    extra = [] if sinks is None else [sinks.double().requires_grad_()]
    out, _ = dense_attention(q, k, v, scale=SCALE, window=window, sinks=extra[0] if extra else None)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *extra], row[3].double())]


def run_rank(transport, plan, rows, kernel, *, window=None, sinks=None):
    """Return (parts, sink gradient): of each of this rank's segments (sequence, start, stop, [out, dq, dk, dv])."""
    parts, sink_grad = [], None if sinks is None else torch.zeros_like(sinks)
    for program in lower_plan(plan, transport.rank):
        segments = program.segments(transport.rank)
        *leaves, grad_out = (
            torch.cat([rows[s.sequence][n][s.start : s.stop] for s in segments])
            .transpose(0, 1)
            .contiguous()
            .transpose(0, 1)  # heads first in memory, as models have them
            for n in range(4)
        )
        leaves = [leaf.requires_grad_() for leaf in leaves]
        mine = [] if sinks is None else [sinks.clone().requires_grad_()]
        planned = PlannedAttention(program, transport, kernel)
        out = planned_attention(*leaves, planned, scale=SCALE, window=window, sinks=mine[0] if mine else None)
        assert out.dtype == leaves[0].dtype
        grads = torch.autograd.grad(out, [*leaves, *mine], grad_out)
        if sink_grad is not None:
            sink_grad += grads[3]
        start = 0
        for s in segments:
            here = slice(start, start + s.num_tokens)
            parts.append((s.sequence, s.start, s.stop, [x[here].detach().clone() for x in (out, *grads[:3])]))
            start = here.stop
    return parts, sink_grad


def joined(rows, by_rank):
    """Put the parts of all ranks back into whole sequences; every token must have been computed once."""
    whole = [[torch.full_like(row[n], float("nan")) for n in (0, 0, 1, 2)] for row in rows]
    for sequence, start, stop, results in (part for parts, _ in by_rank for part in parts):
        for into, result in zip(whole[sequence], results, strict=True):
            assert into[start:stop].isnan().all()
            into[start:stop] = result
    return whole


def check(by_rank, rows, *, window=None, sinks=None):
    """Compare with each document alone, in fp64."""
    dtype = rows[0][0].dtype
    sink_grad = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float64)
    for i, (row, mine) in enumerate(zip(rows, joined(rows, by_rank), strict=True)):
        wanted = dense(row, window=window, sinks=sinks)
        # dq and dk are zero in exact arithmetic where a query sees one key: floored by the size of the others.
        floor = max(0.0 if dtype == torch.float64 else rounding_floor(*wanted[1:4]), 1e-2 * len(row[0]) ** 0.5)
        for name, a, b in zip(NAMES, mine, wanted[:4], strict=True):
            error = relative_error(a, b, floor=floor)
            assert error < TOLERANCES[dtype], f"{name} of sequence {i}, {len(row[0])} tokens: {error}"
        if sink_grad is not None:
            sink_grad += wanted[4]
    if sink_grad is not None:
        assert relative_error(sum(grad for _, grad in by_rank), sink_grad, floor=1e-2) < TOLERANCES[dtype]


def run_strict(plan, rows, kernel=None, **options):
    kernel = kernel or FlashCpuKernel()
    check_order(plan, windows=[options.get("window")])
    return StrictWorld(plan.ranks).run(lambda transport: run_rank(transport, plan, rows, kernel, **options))
