"""Every example runs as a user would run it, and prints something; those beside a plain form are tested with it."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
COMPARED = {name for path in FOLDER.glob("*_plain.py") for name in (path.stem, path.stem.removesuffix("_plain"))}
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in {"tiny", *COMPARED})


# TRL and peft themselves use names of transformers that are going out of use.
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    """In this process, to spare it the imports: warnings are errors here, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.syspath_prepend(example.parent)
    runpy.run_path(str(example), run_name="__main__")
    said = capfd.readouterr()
    assert said.out.strip()
    assert said.err == ""


def test_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} >= {"plan_a_batch", "simulate_a_cluster", "read_a_plan"}
