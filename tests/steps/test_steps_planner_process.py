"""The planner beside rank 0: what its surroundings and its own mistakes can do to it."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from lengthwise.core.errors import RankError
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions
from lengthwise.steps.planner_process import PlannerProcess
from lengthwise.steps.step_planning import StepPlanning

PLANNING = StepPlanning(ranks=2, cost=Cost(linear_seconds=1.0), capacities={"none": 9}, options=PlanOptions())


def test_modules_of_the_working_folder_are_not_imported(tmp_path, monkeypatch):
    """`python -m` looks there first: a user's `queue.py` ended every run."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with PlannerProcess() as planner:
        text, _ = planner.plan(PLANNING, [3, 12])
    assert '"tokens": [3, 12]' in text


def test_a_mistake_in_the_planner_is_told_as_python_tells_it(capfd):
    """Its end waited for the thread that reads, and was an abort by signal 6."""
    with PlannerProcess() as planner:
        with pytest.raises(RankError, match="got its end with status 1"):
            planner.plan(replace(PLANNING, options=None), [3])
        err = capfd.readouterr().err
    assert "AttributeError: 'NoneType' object has no attribute" in err
    assert "Fatal Python error" not in err


def test_what_is_printed_before_the_planner_starts_does_not_reach_its_answers(tmp_path, monkeypatch, capfd):
    """Python itself imports `sitecustomize`; one that greets ended every run."""
    (tmp_path / "sitecustomize.py").write_text("print('hello', flush=True)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with PlannerProcess() as planner:
        text, _ = planner.plan(PLANNING, [3, 12])
    assert '"tokens": [3, 12]' in text
    assert capfd.readouterr().err == "hello\n"
