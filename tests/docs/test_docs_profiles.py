"""The search profile of hypothesis reaches tests that name their number of examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("profile", "examples"), [("ci", 20), ("search", 100)])
def test_profile_scales_a_number_of_examples(profile: str, examples: int) -> None:
    code = "import conftest; from hypothesis import settings; print(settings(max_examples=20).max_examples)"
    environment = {**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=TESTS)
    assert done.stdout.split() == [str(examples)], done.stderr
