"""What steps of a run take against what they were predicted to take.

    python benchmarks/predicted_steps.py [--steps 40] [--repeats 3] [--ranks 2] [--max-tokens 4096] [--sequences 12]

Runs of `tiny` on files of the Python standard library, as a user starts them: measured before the first step and
corrected by their own steps (`measurements: auto`), or priced by estimates for the device (`off`), in turns. Counted
are the steps after the tenth, |predicted - taken| / taken of `predicted_step_seconds` and `step_seconds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pages import Findings, add_out

LEARNING_STEPS = 10
WAYS = ("auto", "off")


def run(folder: Path, measurements: str, asked: argparse.Namespace) -> list[dict[str, float]]:
    """Train once; return the rows of its metrics."""
    run_file, output = folder / "run.json", folder / "out"
    source = {"python_stdlib": True, "max_tokens": asked.max_tokens, "too_long": "skip"}
    keys = {
        "model": "tiny",
        "data": [source],
        "output": str(output),
        "steps": asked.steps,
        "measurements": measurements,
    }
    run_file.write_text(json.dumps(keys | {"global_batch": {"sequences": asked.sequences}}), encoding="utf-8")
    command = [sys.executable, "-m", "lengthwise", "train", str(run_file), "--ranks", str(asked.ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def errors(rows: Sequence[dict[str, float]]) -> list[float]:
    """Return by how much each step after the tenth was mispredicted, relative."""
    return [abs(row["predicted_step_seconds"] / row["step_seconds"] - 1) for row in rows[LEARNING_STEPS:]]


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=12)
    add_out(parser, "predicted_steps")
    asked = parser.parse_args()
    findings = Findings("predicted_steps")
    titles = ("measurements", "repeat", "seconds a step", "mean error", "median", "of steps predicted too long")
    findings.add([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"])
    for repeat in range(asked.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                rows = run(Path(folder), way, asked)
            found, counted = errors(rows), rows[LEARNING_STEPS:]
            over = sum(row["predicted_step_seconds"] > row["step_seconds"] for row in counted) / len(counted)
            seconds = statistics.median(row["step_seconds"] for row in counted)
            shares = (statistics.mean(found), statistics.median(found), over)
            findings.add(
                [f"| {way} | {repeat + 1} | {seconds:.2f} | {' | '.join(f'{100 * x:.1f} %' for x in shares)} |"]
            )
    findings.sign("Measured", f"{asked.steps - LEARNING_STEPS} steps a row")
    findings.write(asked.out)


if __name__ == "__main__":
    main()
