"""Planned attention of several ranks: whole sequences in, out and gradients together again.

Both passes are called directly: autograd has one thread a device, in which ranks that are threads of one process would
wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention import Block, BlockKernel, PlannedAttention
from lengthwise.comm import Transport
from lengthwise.core.plan import Plan
from lengthwise.program import MutualSpans, far_peers, lower_plan
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
    softcap: float | None = None,
    mutual: MutualSpans | None = None,
    device: torch.device | None = None,
    around: Callable[[Transport], Transport] = lambda transport: transport,
    run: Callable[[Any, int], list[Any]] = lambda work, ranks: StrictWorld(ranks).run(work),
) -> tuple[list[list[Tensor]], Tensor | None]:
    """Return (out, dq, dk, dv) of every sequence, on the CPU, and the gradient of the sinks; what no rank gave is NaN.

    `rows` are those of each sequence, computed on `device` (None: where they are); `around` changes the transport;
    `run` calls a function on each rank.
    """

    @torch.no_grad()  # as in autograd's functions
    def work(inner: Transport) -> Any:
        """Return (sequence, start, stop, [out, dq, dk, dv]) of this rank's segments, and its gradient of the sinks."""
        transport = around(inner)
        pieces, of_sinks = [], None if sinks is None else torch.zeros_like(sinks)
        heads = tuple(rows[0][n].shape[1] for n in range(3))
        programs = lower_plan(plan, transport.rank, mutual=mutual)
        transport.connect(far_peers(programs, transport.rank))
        for program in programs:
            segments = program.segments(transport.rank)
            q, k, v, grad = (
                torch.cat([rows[each.sequence][n][each.start : each.stop] for each in segments])
                .to(device)
                .transpose(0, 1)
                .contiguous()
                .transpose(0, 1)  # heads first in memory, as models have them
                for n in range(4)
            )
            planned = PlannedAttention(program, transport, kernel)
            out, attended = planned.forward(Block(q=q, k=k, v=v, scale=scale, softcap=softcap), window, sinks)
            assert out.dtype == q.dtype
            *grads, sink_grad = planned.backward(grad, attended, heads, window, sinks)
            assert (sink_grad is None) == (sinks is None)
            of_sinks = of_sinks if of_sinks is None or sink_grad is None else of_sinks + sink_grad
            start = 0
            for each in segments:
                results = [x[start : start + each.num_tokens].cpu() for x in (out, *grads) if x is not None]
                pieces.append((each.sequence, each.start, each.stop, results))
                start += each.num_tokens
        return pieces, of_sinks

    whole = [[torch.full_like(row[n], float("nan"), device="cpu") for n in (0, 0, 1, 2)] for row in rows]
    every = run(work, plan.ranks)
    for sequence, start, stop, results in (piece for pieces, _ in every for piece in pieces):
        for into, part in zip(whole[sequence], results, strict=True):
            assert into[start:stop].isnan().all(), "a token is computed once"
            into[start:stop] = part
    of_sinks = [grad for _, grad in every if grad is not None]
    return whole, torch.stack(of_sinks).sum(0) if of_sinks else None
