"""Hypothesis profiles reach tests that name their number of examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROPERTY = """
from hypothesis import given, settings, strategies

@settings(max_examples=20)
@given(strategies.integers())
def test_property(number):
    print("tried")
"""


@pytest.mark.parametrize(("profile", "examples"), [("ci", 8), ("full", 20), ("search", 100)])
def test_profile_scales_a_number_of_examples(profile: str, examples: int, tmp_path: Path) -> None:
    (tmp_path / "test_property.py").write_text(PROPERTY, encoding="utf-8")
    environment = {**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tried") == examples
