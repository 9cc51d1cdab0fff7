"""What the routers' balance loss costs: the step of one rank with and without it.

    python benchmarks/router.py [--repeats 5]

Forward and backward of a small Qwen3-MoE over one batch of 16 sequences of 256 tokens, in 1, 2, 4 or 8 microbatches,
in fp32 on one thread, through the engine's own path. The last microbatch of a rank keeps its graph in the counting
pass, so of n microbatches n - 1 run forward once more. CPU seconds of the process, not the clock: others may use the
machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from testing import make_batch, make_plan
from transformers import Qwen3MoeConfig

from lengthwise.attention import choose_kernel
from lengthwise.cli.machine import machine_lines
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model
from pages import Findings, add_out

SEQUENCES, TOKENS, VOCAB = 16, 256, 512
LAYERS = 4


def step_seconds(num_microbatches: int, repeats: int) -> dict[bool, float]:
    """Return the median CPU seconds of a step, with and without the balance loss; the two take turns."""
    batch, each = make_batch([TOKENS] * SEQUENCES, vocab=VOCAB), SEQUENCES // num_microbatches
    pieces = [Piece(ranks=(0,), sequences=tuple(range(i, i + each))) for i in range(0, SEQUENCES, each)]
    plan = make_plan(1, batch.lengths, pieces, layers=LAYERS)
    transport, kernel = SoloTransport(), choose_kernel(torch.device("cpu"))
    models = {}
    for balanced in (False, True):
        config = Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            output_router_logits=balanced,
        )
        models[balanced] = build_model(ModelSource(name="moe", config=config, weights=False), seed=0)
        FlatParameters(models[balanced], transport, dtype=torch.float32)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for balanced, model in models.items():
            start = time.process_time()
            run_plan(model, plan, batch, transport, kernel, name="benchmark")
            if repeat:  # the first round warms up
                seconds[balanced].append(time.process_time() - start)
    return {balanced: statistics.median(each) for balanced, each in seconds.items()}


def main() -> None:
    """Print a row for each number of microbatches, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description="the cost of the routers' balance loss")
    parser.add_argument("--repeats", type=int, default=5)
    add_out(parser, "router")
    arguments, findings = parser.parse_args(), Findings("router")
    torch.set_num_threads(1)
    print("\n".join(machine_lines()[1:]))
    findings.add(["| microbatches | without | with | ratio |", "|---|---|---|---|"])
    for num_microbatches in (1, 2, 4, 8):
        found = step_seconds(num_microbatches, arguments.repeats)
        cells = f"{found[False]:.2f} s | {found[True]:.2f} s | {found[True] / found[False]:.2f}"
        findings.add([f"| {num_microbatches} | {cells} |"])
    findings.sign("Measured", f"CPU seconds, medians of {arguments.repeats} turns")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
