"""What is made in one place: a second file that makes it becomes an argument of the first."""

import re
from pathlib import Path

import pytest

import lengthwise

SOURCES = sorted(Path(lengthwise.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("name", ["Engine", "PlanOptions", "Parameters", "StageShare", "StepMemory", "StepRunner"])
def test_a_record_of_many_callers_is_made_in_one_file(name):
    made = [path for path in SOURCES if re.search(rf"(?<!class )\b{name}\(", path.read_text(encoding="utf-8"))]
    assert len(made) == 1, made
