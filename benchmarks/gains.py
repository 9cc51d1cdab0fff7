"""Simulated step times on 8 and 64 GPUs: ours, all rows of FSDP2 and Megatron-Core's rule, each at its best settings.

    python benchmarks/gains.py --out docs/benchmarks/gains.md

Every line is a `lengthwise simulate`, whose answer is read from its JSON. A second table adds one kind of recomputation
after the other to our quickest layout. No GPU; about four minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lengthwise.cli import main as lengthwise
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.simulator import OURS, POWERS, Scenario, compare_layouts
from lengthwise.simulator.rivals import BY_WORK, ONE_RING, PACKED, PADDED_RINGS
from pages import Findings, markdown, parse_options

QWEN, LLAMA = "Qwen/Qwen3-8B", "meta-llama/Llama-3.3-70B-Instruct"
CASES = [
    *((QWEN, lengths, 8) for lengths in ("github", "prolong", "wikipedia")),
    *((model, lengths, 64) for model in (QWEN, LLAMA) for lengths in ("github", "prolong")),
]
ROWS = (OURS, PADDED_RINGS, PACKED, ONE_RING, BY_WORK, POWERS)

LONGEST = 128 * 1024
KINDS = {  # and the kernel
    "`layer` alone": (("layer",), ""),
    "`none`, `all_but_attention`": (("none", "layer", "all_but_attention"), ""),
    "`elementwise`, and two kinds by layer": (RECOMPUTE_KINDS, ""),
    "FlashAttention-3": (RECOMPUTE_KINDS, "flash3"),
}
BATCHES = {
    "Qwen3-8B, 16K each, 8": (QWEN, 8, [16 * 1024] * 64),
    "Qwen3-8B, 128K each, 8": (QWEN, 8, [LONGEST] * 8),
    "Llama-3.3-70B, github, 64": (LLAMA, 64, draw_lengths("github", 64 * LONGEST, 0, LONGEST)),
}


def by_change(model: str, gpus: int, lengths: list[int]) -> Iterator[str]:
    """Yield the seconds of our quickest layout and its share of the peak, with more and more kinds of recomputation."""
    for kinds, kernel in KINDS.values():
        hardware = named_hardware("h100")
        hardware = hardware.with_kernel(kernel) if kernel else hardware
        scenario = Scenario(
            shape=named_shape(model), hardware=hardware, devices=gpus, context_tokens=LONGEST, kinds=kinds
        )
        scenario = replace(scenario, base=replace(scenario.base, offload="off"))
        found = min(
            (each.found for each in compare_layouts([lengths], scenario) if each.found),
            key=lambda one: one.mean_seconds,
        )
        share = found.steps[0].flops / found.mean_seconds / gpus / hardware.peak_flops_per_second
        yield f"{found.mean_seconds:.1f} s, {share:.0%}"


def answer_of(model: str, lengths: str, gpus: int) -> dict[str, Any]:
    """Return the answer of `lengthwise simulate`, as in its JSON."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        command = ["simulate", "--model", model, "--lengths", lengths, "--gpus", str(gpus), "--out", folder]
        with contextlib.suppress(SystemExit):
            lengthwise(command)
        return json.loads((Path(folder) / "simulation.json").read_text(encoding="utf-8"))["answer"]


def cells(answer: dict[str, Any]) -> Iterator[str]:
    """Yield our seconds, those of each other row with its ratio, and the range over kernels."""
    took = {row["name"]: statistics.mean(row["step_seconds"]) for row in answer["rows"] if row["step_seconds"]}
    offloads = {row["name"] for row in answer["rows"] if row["settings"] and row["settings"]["offloads"]}
    for name in ROWS:
        if name not in took:
            yield "does not fit"
            continue
        ratio = "" if name == OURS else f", {took[name] / took[OURS]:.2f}x"
        yield f"{took[name]:.1f} s{ratio}{' (offload)' * (name in offloads)}"
    best = min(seconds for name, seconds in took.items() if name not in (OURS, POWERS))
    ratios = sorted(f"{ratio:.2f}" for ratio in (best / took[OURS], *answer["kernels"].values()))
    yield f"{' to '.join(dict.fromkeys((ratios[0], ratios[-1])))}x"


def main() -> None:
    """Print the table, and write it into its page."""
    options = parse_options(__doc__)
    found = Findings("gains")
    heads = f"model, lengths, GPUs | {' | '.join(ROWS)} | quickest of FSDP2, by kernel"
    rows = ([f"{model.partition('/')[2]}, {lengths}, {gpus}", *cells(answer_of(model, lengths, gpus))]
            for model, lengths, gpus in CASES)  # fmt: skip
    found.add(markdown(heads, rows))
    heads = f"model, lengths, GPUs | {' | '.join(KINDS)}"
    found.add(["", *markdown(heads, ([name, *by_change(*batch)] for name, batch in BATCHES.items()))])
    found.sign("Simulated", "H100s, 128K tokens a GPU and step", options.out)


if __name__ == "__main__":
    main()
