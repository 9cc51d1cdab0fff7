"""Simulated step times on 8 and 64 GPUs: ours, all rows of FSDP2 and Megatron-Core's rule, each at its best settings.

    python benchmarks/gains.py --out docs/benchmarks/gains.md

Every line is a `lengthwise simulate`, whose answer is read from its JSON. No GPU; about three minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthwise.cli import main as lengthwise
from lengthwise.simulator import OURS, POWERS
from lengthwise.simulator.rivals import BY_WORK, ONE_RING, PACKED, PADDED_RINGS
from pages import Findings, markdown, parse_options

QWEN, LLAMA = "Qwen/Qwen3-8B", "meta-llama/Llama-3.3-70B-Instruct"
CASES = [
    *((QWEN, lengths, 8) for lengths in ("github", "prolong", "wikipedia")),
    *((model, lengths, 64) for model in (QWEN, LLAMA) for lengths in ("github", "prolong")),
]
ROWS = (OURS, PADDED_RINGS, PACKED, ONE_RING, BY_WORK, POWERS)


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
    found.sign("Simulated", "H100s, 128K tokens a GPU and step", options.out)


if __name__ == "__main__":
    main()
