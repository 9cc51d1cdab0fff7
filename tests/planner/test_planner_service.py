"""The planner beside rank 0: what its surroundings and its own mistakes can do to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from testing.ranks import fork_ranks

from lengthwise.core.errors import RankError
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.planner.service.step_planning import StepPlanning

PLANNING = StepPlanning(ranks=2, cost=Cost(linear_seconds=1.0), capacities={"none": 9}, options=PlanOptions())


def test_the_working_folder_and_what_is_printed_at_the_start_do_not_reach_the_planner(tmp_path, monkeypatch, capfd):
    """`python -m` imports from there first, a user's `queue.py`; Python imports `sitecustomize`, which prints."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("print('hello', flush=True)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *(path for path in sys.path if path)])
    with PlannerProcess() as planner:
        text, _ = planner.plan(PLANNING, [3, 12])
    assert '"tokens": [3, 12]' in text
    assert capfd.readouterr().err == "hello\n"


def test_a_mistake_in_the_planner_is_told_as_python_tells_it(capfd):
    """Its end waited for the thread that reads, and was an abort by signal 6."""
    with PlannerProcess() as planner:
        with pytest.raises(RankError, match="got its end with status 1"):
            planner.plan(replace(PLANNING, options=None), [3])
        err = capfd.readouterr().err
    assert "AttributeError: 'NoneType' object has no attribute" in err
    assert "Fatal Python error" not in err


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _command(process: int | str) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def _forked_planner(world):
    """Return a forked planner's plan, its pipes and sockets, how two others ended, and the children that are left."""
    if world.rank:
        return None
    gone = []
    with PlannerProcess(forks=True) as planner:
        text, _ = planner.plan(PLANNING, [3, 12])
        (child,) = _children()
        assert _command(child) == _command("self"), "a new process has another command line"
        opened = [os.readlink(f"/proc/{child}/fd/{number}") for number in range(3, 100) if _is_open(child, number)]
    for wrong in (lambda: planner.plan(replace(PLANNING, options=None), [3]), lambda: os.kill(_children()[0], 9)):
        with PlannerProcess(forks=True) as planner:
            try:
                wrong()
                planner.plan(PLANNING, [3])
            except RankError as error:
                gone.append(error.got)
    return text, opened, gone, _children()


def _is_open(process: int, number: int) -> bool:
    return os.path.lexists(f"/proc/{process}/fd/{number}")


def test_a_rank_of_ours_forks_its_planner_and_reaps_it(capfd):
    text, opened, gone, left = fork_ranks(_forked_planner, 2)[0]
    assert '"tokens": [3, 12]' in text
    assert len(opened) == 2, "the two pipes, and nothing of the rank's"
    assert gone == ["its end with status 1", "its end by signal 9"]
    assert left == []
    assert "AttributeError" in capfd.readouterr().err


def test_a_forked_planner_ends_with_its_rank(tmp_path):
    def killed(world):
        if world.rank == 0:
            PlannerProcess(forks=True).plan(PLANNING, [3])
            (tmp_path / "planner").write_text(str(_children()[0]))
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError):
        fork_ranks(killed, 2)
    planner, end = (tmp_path / "planner").read_text(), time.monotonic() + 10
    while os.path.exists(f"/proc/{planner}") and _command(planner):  # a zombie has none
        assert time.monotonic() < end, "the planner lives on"
        time.sleep(0.01)


def test_a_fork_that_closes_its_copy_leaves_the_planner_alone():
    """What a fork collects, such as a session that nobody closed, ended the planner of its parent."""
    with PlannerProcess(forks=True) as planner:
        fork_ranks(lambda _world: planner.close(), 1)
        assert '"tokens": [3, 12]' in planner.plan(PLANNING, [3, 12])[0]


def test_a_process_with_threads_is_not_forked():
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait, daemon=True)
    thread.start()
    before = set(_children())
    with PlannerProcess(forks=True):
        (child,) = set(_children()) - before
        assert "lengthwise.planner.service.process" in _wait_for_command(child)
    goes_on.set()


def _wait_for_command(child: int) -> str:
    end = time.monotonic() + 10
    while _command(child) in (b"", _command("self")) and time.monotonic() < end:  # until it runs what it is for
        time.sleep(0.01)
    return _command(child).decode()
