"""Attention of all ranks put together again, compared with each document alone in one process, in fp64."""

import torch
from testing import dense_attention, relative_error, rounding_floor
from testing.attention_ranks import attend_on_ranks
from testing.order import check_order

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


def dense(row, *, window=None, sinks=None, mutual=()):
    """Return [out, dq, dk, dv] of one sequence alone in fp64, and the gradient of the sinks where there are any."""
    q, k, v = (x.double().requires_grad_() for x in row[:3])
    extra = [] if sinks is None else [sinks.double().requires_grad_()]
    out, _ = dense_attention(q, k, v, scale=SCALE, window=window, sinks=extra[0] if extra else None, mutual=mutual)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *extra], row[3].double())]


def check(found, rows, *, window=None, sinks=None, mutual=()):
    """Compare with each document alone, in fp64."""
    whole, sink_grad = found
    dtype = rows[0][0].dtype
    expected_sinks = 0.0
    for i, (row, mine) in enumerate(zip(rows, whole, strict=True)):
        wanted = dense(row, window=window, sinks=sinks, mutual=mutual[i] if mutual else ())
        # dq and dk are zero in exact arithmetic where a query sees one key: floored by the size of the others.
        floor = max(0.0 if dtype == torch.float64 else rounding_floor(*wanted[1:4]), 1e-2 * len(row[0]) ** 0.5)
        for name, a, b in zip(NAMES, mine, wanted[:4], strict=True):
            error = relative_error(a, b, floor=floor)
            assert error < TOLERANCES[dtype], f"{name} of sequence {i}, {len(row[0])} tokens: {error}"
        expected_sinks += wanted[4] if sinks is not None else 0.0
    if sinks is not None:
        assert relative_error(sink_grad, expected_sinks, floor=1e-2) < TOLERANCES[dtype]


def run_strict(plan, rows, kernel=None, **options):
    """Return what `attend_on_ranks` does, on ranks whose order of calls is proved first."""
    check_order(plan, windows=[options.get("window")], mutual=options.get("mutual"))
    return attend_on_ranks(plan, rows, kernel or FlashCpuKernel(), scale=SCALE, **options)
