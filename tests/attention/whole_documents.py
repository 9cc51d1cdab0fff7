"""Attention of all ranks put together again, compared with each document alone in one process, in fp64."""

import torch
from testing import dense_attention, relative_error, rounding_floor
from testing.attention_ranks import attend_on_ranks
from testing.order import check_order
from testing.plans import line_to

from lengthwise.attention import FlashCpuKernel

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


def dense(rows, *, plan=None, window=None, sinks=None, mutual=()):
    """Return [out, dq, dk, dv] of each sequence in fp64, after those that it continues, and the gradient of sinks."""
    leaves = [[x.double().requires_grad_() for x in row[:3]] for row in rows]
    sinks, outs, total = None if sinks is None else sinks.double().requires_grad_(), [], 0.0
    for i, row in enumerate(rows):
        line = [i] if plan is None else line_to(plan, i)
        text = (torch.cat([leaves[each][n] for each in line]) for n in range(3))
        seen = mutual[i] if mutual else ()
        out, _ = dense_attention(*text, scale=SCALE, window=window, sinks=sinks, mutual=seen)
        outs.append(out[-len(row[0]) :])
        total = total + (outs[-1] * row[3].double()).sum()
    given = [x for leaf in leaves for x in leaf] + ([] if sinks is None else [sinks])
    grads = torch.autograd.grad(total, given)
    whole = [[out.detach(), *grads[3 * i : 3 * i + 3]] for i, out in enumerate(outs)]
    return whole, None if sinks is None else grads[-1]


def check(found, rows, **how):
    """Compare with each document alone, in fp64."""
    (whole, sink_grad), (wanted, wanted_sinks) = found, dense(rows, **how)
    dtype = rows[0][0].dtype
    for i, (row, mine, alone) in enumerate(zip(rows, whole, wanted, strict=True)):
        # dq and dk are zero in exact arithmetic where a query sees one key: floored by the size of the others.
        floor = max(0.0 if dtype == torch.float64 else rounding_floor(*alone[1:]), 1e-2 * len(row[0]) ** 0.5)
        for name, a, b in zip(NAMES, mine, alone, strict=True):
            error = relative_error(a, b, floor=floor)
            assert error < TOLERANCES[dtype], f"{name} of sequence {i}, {len(row[0])} tokens: {error}"
    if wanted_sinks is not None:
        assert relative_error(sink_grad, wanted_sinks, floor=1e-2) < TOLERANCES[dtype]


def run_strict(plan, rows, kernel=None, **options):
    """Return what `attend_on_ranks` does, on ranks whose order of calls is proved first."""
    check_order(plan, windows=[options.get("window")], mutual=options.get("mutual"))
    return attend_on_ranks(plan, rows, kernel or FlashCpuKernel(), scale=SCALE, **options)
