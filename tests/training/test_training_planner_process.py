"""The planner beside rank 0: what its surroundings and its own mistakes can do to it."""

from __future__ import annotations

import sys

import pytest

from lengthwise.core.errors import RankError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.training.planner_process import PlannerProcess


def test_modules_of_the_working_folder_are_not_imported(tmp_path, monkeypatch):
    """`python -m` looks there first: a user's `queue.py` ended every run."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    options = {"cluster": Cluster(ranks=2, capacity_tokens=9), "cost": Cost(linear_seconds=1.0)}
    with PlannerProcess(lambda lengths: {"tokens": tuple(lengths), **options}) as planner:
        text, _ = planner.plan([3, 12])
    assert '"tokens": [3, 12]' in text


def test_a_mistake_in_the_planner_is_told_as_python_tells_it(capfd):
    """Its end waited for the thread that reads, and was an abort by signal 6."""
    with PlannerProcess(lambda lengths: {"tokens": lengths}) as planner:
        with pytest.raises(RankError, match="got its end with status 1"):
            planner.plan([3])
        err = capfd.readouterr().err
    assert "TypeError: plan_step() missing 2 required positional arguments" in err
    assert "Fatal Python error" not in err
