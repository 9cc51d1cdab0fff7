"""Every example runs as a user would run it, and prints something; those beside a plain form are tested with it."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
COMPARED = {name for path in FOLDER.glob("*_plain.py") for name in (path.stem, path.stem.removesuffix("_plain"))}
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in {"tiny", *COMPARED})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""


def test_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} >= {"plan_a_batch", "simulate_a_cluster", "read_a_plan"}
