"""The planner beside rank 0, forked from the process that asks: a test is spared 0.3 CPU seconds of imports a run."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lengthwise.training import planner_process


class ForkedPlanner:
    """What `PlannerProcess` asks of `subprocess.Popen`."""

    def __init__(self, arguments, *, stdin, stdout, env):
        asked, answers = os.pipe(), os.pipe()
        self._status, self._pid = None, os.fork()
        if not self._pid:
            self._answer(asked[0], answers[1])
        os.close(asked[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(asked[1], "wb"), os.fdopen(answers[0], "rb")

    def _answer(self, asked, answers):
        try:
            os.dup2(asked, 0)
            os.dup2(answers, 1)
            os.closerange(3, 4096)  # as Popen does: a pipe that stays open here would never end
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
            planner_process.main()
        finally:
            os._exit(1)

    def kill(self):
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._status is None:
            try:
                pid, status = os.waitpid(self._pid, 0 if deadline is None else os.WNOHANG)
            except ChildProcessError:  # someone else waited for it; what Popen makes of that
                pid, status = self._pid, 0
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("planner", timeout)
            else:
                time.sleep(0.01)
        return self._status


@pytest.fixture(autouse=True)
def planner_of_runs(monkeypatch):
    """Fork the planners of runs. Tests of the process itself take its real start by a fixture of the same name."""
    names = SimpleNamespace(Popen=ForkedPlanner, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(planner_process, "subprocess", names)
