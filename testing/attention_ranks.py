"""Planned attention of ranks that are threads of one process: whole sequences in, out and gradients together again.

Both passes are called directly: autograd has one thread a device, in which ranks of one process would wait for each
other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention import Block, BlockKernel, PlannedAttention
from lengthwise.comm import Transport
from lengthwise.core.plan import Plan
from lengthwise.program import lower_plan
from testing.strict import StrictWorld

Rows = Sequence[Tensor]
"""(q, k, v, gradient of the output) of one sequence, each (tokens, heads, head_dim), or (out, dq, dk, dv) of it."""


def attend_on_ranks(
    plan: Plan,
    rows: Sequence[Rows],
    kernel: BlockKernel,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    device: torch.device | None = None,
    around: Callable[[Transport], Transport] = lambda transport: transport,
) -> list[list[Tensor]]:
    """Return (out, dq, dk, dv) of every sequence, on the CPU; what no rank gave is NaN.

    `rows` are those of each sequence, computed on `device` (None: where they are); `around` changes the transport.
    """

    def work(transport: Transport) -> list[tuple[int, int, int, list[Tensor]]]:
        return _run_rank(around(transport), plan, rows, kernel, scale, window, sinks, device)

    whole = [[torch.full_like(row[n], float("nan"), device="cpu") for n in (0, 0, 1, 2)] for row in rows]
    every: Any = StrictWorld(plan.ranks).run(work)
    for found in every:
        for sequence, start, stop, results in found:
            for into, part in zip(whole[sequence], results, strict=True):
                into[start:stop] = part
    return whole


def _run_rank(
    transport: Transport,
    plan: Plan,
    rows: Sequence[Rows],
    kernel: BlockKernel,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    device: torch.device | None,
) -> list[tuple[int, int, int, list[Tensor]]]:
    """Return (sequence, start, stop, [out, dq, dk, dv]) of this rank's segments."""
    pieces = []
    heads = tuple(rows[0][n].shape[1] for n in range(3))
    for program in lower_plan(plan, transport.rank):
        segments = program.segments(transport.rank)
        q, k, v, grad = (
            torch.cat([rows[each.sequence][n][each.start : each.stop] for each in segments]).to(device)
            for n in range(4)
        )
        planned = PlannedAttention(program, transport, kernel)
        out, attended = planned.forward(Block(q=q, k=k, v=v, scale=scale), window, sinks)
        *grads, sink_grad = planned.backward(grad, attended, heads, window, sinks)
        assert (sink_grad is None) == (sinks is None)
        start = 0
        for each in segments:
            results = [x[start : start + each.num_tokens].cpu() for x in (out, *grads) if x is not None]
            pieces.append((each.sequence, each.start, each.stop, results))
            start += each.num_tokens
    return pieces
