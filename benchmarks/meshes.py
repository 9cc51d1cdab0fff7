"""Every planner with the best mesh that a user could pick for it: nothing here is measured, all is simulated.

    python benchmarks/meshes.py [--settings 64:256K:4M,...] [--planners static,...] [--batches 2] [--folder DIR]

A setting is GPUs : longest sequence : tokens of a step, of a 7B Llama on H100s and lengths as of GitHub files. For each
of 1, 2, 4 and 8 tensor-parallel devices a rank `lengthwise simulate` is run as a user would run it, twice: *plain*
(rings only, everything kept for backward) and *auto* (split heads and activation checkpointing where they end a step
sooner, for all planners alike). Capacity is what memory leaves by estimate; a mesh that cannot hold the longest
sequence has no figure. *best* is the least of the eight. What this version trains is the first: plain, without tensor
parallelism. A setting takes one to ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pages import Findings, add_out

MODEL, LENGTHS, TENSOR = "llama-7b", "github", (1, 2, 4, 8)
CHOICES = {"plain": (), "auto": ("--heads", "auto", "--recompute", "auto")}
SETTINGS = "32:128K:1M,64:256K:4M,128:512K:4M,256:1M:8M"
PLANNERS = "static,single-degree,power-of-two,bytescale,lengthwise"


def simulated_seconds(arguments: Sequence[str], folder: Path) -> dict[str, float]:
    """Run `lengthwise simulate`, unless `folder` holds its result; return each planner's mean step seconds, or none."""
    file = folder / "simulation.json"
    if not file.exists():
        command = [sys.executable, "-m", "lengthwise", "simulate", *arguments, "--out", str(folder)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode == 2 and "expected at most" in done.stderr:  # the mesh does not hold the longest sequence
            return {}
        if done.returncode:
            raise SystemExit(done.stderr)
    return {name: each["mean_seconds"] for name, each in json.loads(file.read_text())["planners"].items()}


def table(settings: Sequence[str], planners: str, batches: int, folder: Path) -> Iterator[str]:
    """Yield one line a setting and planner as they are found."""
    meshes = [(choice, tensor) for choice in CHOICES for tensor in TENSOR]
    heads = ["GPUs", "longest", "step", "planner", *(f"{choice}, TP {tensor}" for choice, tensor in meshes), "best"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for setting in settings:
        gpus, context, tokens = setting.split(":")
        common = ["--model", MODEL, "--lengths", LENGTHS, "--context", context, "--batch-tokens", tokens]
        common += ["--gpus", gpus, "--planners", planners, "--batches", str(batches)]
        found: list[dict[str, float]] = []
        for choice, tensor in meshes:
            place = folder / f"{gpus}-{context}-{tokens}-{choice}-{tensor}"
            found.append(simulated_seconds([*common, "--tp", str(tensor), *CHOICES[choice]], place))
        for planner in planners.split(","):
            seconds = [each.get(planner, math.inf) for each in found]
            cells = ["-" if math.isinf(each) else f"{each:.2f}" for each in (*seconds, min(seconds))]
            yield "| " + " | ".join([gpus, context, tokens, planner, *cells]) + " |"


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--planners", default=PLANNERS)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/meshes"), help="simulations, taken up again")
    add_out(parser, "meshes")
    arguments, findings = parser.parse_args(), Findings("meshes")
    findings.add(table(arguments.settings.split(","), arguments.planners, arguments.batches, arguments.folder))
    findings.sign("Simulated", f"seconds of a step, mean of {arguments.batches} batches")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
