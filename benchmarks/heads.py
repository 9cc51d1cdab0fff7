"""What splitting heads costs and saves in one attention layer: CPU seconds and bytes of a rank, forward and backward.

    python benchmarks/heads.py [--degree 4] [--tokens 8192] [--kv-heads 8 2] [--repeats 3]

One sequence over a group of processes that talk through gloo, 16 heads of 64 in fp32, one thread each: as one ring
(groups of 1), in groups that split heads with a ring over them, and in one group without a ring. CPU seconds include
those of gloo's own threads and do not hang on how many cores there are; waiting for links is not in them, the bytes say
that. Medians over repeats, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from math import prod

import torch
from testing import RecordingTransport, make_plan, run_ranks

from lengthwise.attention import FlashCpuKernel, PlannedAttention, planned_attention
from lengthwise.comm import Transport
from lengthwise.core.plan import Piece, Plan
from lengthwise.program import lower_plan
from lengthwise.report.figures import count
from pages import Findings, add_out

HEADS, HEAD_DIM = 16, 64


def rank_layers(transport: Transport, plans: dict[int, Plan], kv_heads: int, repeats: int) -> dict[int, list[float]]:
    """Run a layer of each plan in turn, some times; return by groups (CPU seconds of each repeat, last the bytes)."""
    torch.set_num_threads(1)
    found: dict[int, list[float]] = {heads: [] for heads in plans}
    sent: dict[int, float] = {}
    for repeat in range(repeats + 1):  # the first is not counted
        for heads, plan in plans.items():
            recording = RecordingTransport(transport)
            (program,) = lower_plan(plan, transport.rank)
            planned = PlannedAttention(program, recording, FlashCpuKernel())
            counts = (HEADS, kv_heads, kv_heads)
            q, k, v = (torch.randn(planned.num_tokens, each, HEAD_DIM, requires_grad=True) for each in counts)
            gradient = torch.randn(planned.num_tokens, HEADS, HEAD_DIM)
            transport.all_reduce(torch.zeros(1))
            start = time.process_time()
            planned_attention(q, k, v, planned, scale=HEAD_DIM**-0.5).backward(gradient)
            seconds = time.process_time() - start
            sent[heads] = sum(4 * prod(shape) for call in recording.calls for _, shape, _ in call.sends)
            if repeat:
                found[heads].append(seconds)
    return {heads: [*times, sent[heads]] for heads, times in found.items()}


def main() -> None:
    """Print one row a split, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degree", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--repeats", type=int, default=3)
    add_out(parser, "heads")
    options, findings = parser.parse_args(), Findings("heads")
    degree = options.degree
    findings.add(
        [
            "| heads of keys | groups of | CPU seconds of a rank | of a ring's | bytes that it sends | of a ring's |",
            "|---|---|---|---|---|---|",
        ]
    )
    pieces = {
        heads: Piece(ranks=tuple(range(degree)), sequences=(0,), heads=heads)
        for heads in range(1, degree + 1)
        if degree % heads == HEADS % heads == 0
    }
    plans = {heads: make_plan(degree, [options.tokens], [piece]) for heads, piece in pieces.items()}
    for kv_heads in options.kv_heads:
        by_rank = run_ranks(lambda t, kv=kv_heads: rank_layers(t, plans, kv, options.repeats), degree)
        rows = {
            heads: (
                statistics.mean(statistics.median(each[heads][:-1]) for each in by_rank),
                statistics.mean(each[heads][-1] for each in by_rank),
            )
            for heads in plans
        }
        for heads, (seconds, sent) in rows.items():
            findings.add(
                [
                    f"| {kv_heads} | {heads} | {seconds:.3f} | {seconds / rows[1][0]:.3f} "
                    f"| {count(sent)}B | {sent / rows[1][1]:.3f} |"
                ]
            )
    findings.sign("Measured", f"one sequence of {options.tokens:,} tokens over {degree} processes, fp32")
    findings.write(options.out)


if __name__ == "__main__":
    main()
