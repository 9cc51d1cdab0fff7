"""What recomputation saves: bytes that forward leaves for backward, and the peak of both, of one microbatch.

    python benchmarks/recompute.py [--layers 8] [--hidden 512] [--tokens 4096]

One process, a Llama over bytes in fp32 with heads of 64, half as many for keys and values, one sequence. Every tensor
that an operation makes is counted, once, until it is freed; parameters and their gradients are not. These are bytes,
not times: they are the same on every machine.
"""

from __future__ import annotations

import argparse

import torch
from testing import LiveBytes, make_batch, make_plan

from lengthwise.attention import ActivationPolicy, PlannedAttention, choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.engine.replicated import FlatParameters
from lengthwise.models import ModelSource, apply_policy, build_model, model_loss
from lengthwise.models.load import tiny_config
from lengthwise.program import lower_plan
from lengthwise.report.figures import count
from pages import Findings, add_out


def measure(kind: str, *, layers: int, hidden: int, tokens: int) -> tuple[int, int]:
    """Return (bytes that wait for backward, peak bytes) of one forward and backward."""
    config = tiny_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = hidden, 3 * hidden, layers
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = hidden // 64, hidden // 128, 64
    model = build_model(ModelSource(name="llama", config=config, weights=False), seed=0)
    transport = SoloTransport()
    flat = FlatParameters(model, transport, dtype=torch.float32)
    batch = make_batch([tokens], vocab=config.vocab_size)
    (program,) = lower_plan(make_plan(1, [tokens], [Piece(ranks=(0,), sequences=(0,))], layers=layers), 0)
    tensors = batch.tensors(program.segments(0))
    planned = PlannedAttention(program, transport, choose_kernel(torch.device("cpu")))
    with LiveBytes(flat.values, flat.grads, *tensors) as live:
        with apply_policy(model, planned, ActivationPolicy(recompute=kind)):
            loss = model_loss(model, planned, *tensors)
        waiting = live.now_bytes
        loss.backward()
    return waiting, live.peak_bytes


def main() -> None:
    """Print one row a kind, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    add_out(parser, "recompute")
    sizes, findings = vars(parser.parse_args()), Findings("recompute")
    out = sizes.pop("out")
    torch.set_num_threads(1)
    findings.add(["| recompute | waiting for backward | of `none` | peak | of `none` |", "|---|---|---|---|---|"])
    rows = {kind: measure(kind, **sizes) for kind in RECOMPUTE_KINDS}
    for kind, row in rows.items():
        cells = (f"{count(each)}B | {each / all_:.3f}" for each, all_ in zip(row, rows["none"], strict=True))
        findings.add([f"| `{kind}` | {' | '.join(cells)} |"])
    findings.sign("Measured", "bytes, counted tensor by tensor")
    findings.write(out)


if __name__ == "__main__":
    main()
