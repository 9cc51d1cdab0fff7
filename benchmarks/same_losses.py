"""The losses of one run on other numbers of ranks and by other planners: measured, step by step.

    python benchmarks/same_losses.py [--ranks 1,2,3] [--planners lengthwise,static] [--steps 8] [--capacity 1024]

`lengthwise train` on the Python standard library's files, the tiny model in fp32, the same seed. A rank holds as many
tokens as its share of the longest file, so with more than one rank nearly all files are cut over rings, by every
planner otherwise. The loss of a step depends on all updates before it, so wrong gradients would show. What differences
there are come from fp32 sums in another order. It takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import Findings, add_out


def train(folder: Path, ranks: int, planner: str, steps: int, capacity: int) -> list[dict[str, float]]:
    """Run `lengthwise train`; return the lines of its metrics."""
    config = folder / f"{planner}-{ranks}.yaml"
    config.write_text(
        f"model: tiny\ndata: [{{python_stdlib: true, max_tokens: {capacity}, too_long: skip}}]\nsteps: {steps}\n"
        f"global_batch: {{tokens: {4 * capacity}}}\ncapacity_tokens: {-(-capacity // ranks) + 1}\n"
        f"planner: {planner}\noutput: {config.stem}\n"
    )
    command = [sys.executable, "-m", "lengthwise", "train", str(config), "--ranks", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / config.stem / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    """Print a row a run, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--planners", default="lengthwise,static")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=4096, help="tokens of the longest file; of a rank: its share")
    add_out(parser, "same_losses")
    arguments, findings = parser.parse_args(), Findings("same_losses")
    heads = [
        "ranks",
        "planner",
        "tokens in rings",
        "loss of the first step",
        "of the last",
        "largest relative difference",
    ]
    findings.add(["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"])
    first: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, arguments.ranks.split(",")):
            for planner in arguments.planners.split(",") if ranks > 1 else arguments.planners.split(",")[:1]:
                steps = train(Path(folder), ranks, planner, arguments.steps, arguments.capacity)
                losses = [step["loss"] for step in steps]
                first = first or losses
                difference = max(abs(loss / of_one - 1) for loss, of_one in zip(losses, first, strict=True))
                rings = sum(step["ring_token_ratio"] * step["num_tokens"] for step in steps)
                share = rings / sum(step["num_tokens"] for step in steps)
                cells = [f"{100 * share:.0f} %", f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{difference:.0e}"]
                findings.add(["| " + " | ".join([str(ranks), planner, *cells]) + " |"])
    findings.sign("Measured", f"{arguments.steps} steps, tiny model, fp32; differences from the first row")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
