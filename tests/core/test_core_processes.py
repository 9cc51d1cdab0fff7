"""Children of a process whose threads ended a moment ago."""

import os
import signal
import sys
import threading
import time

import pytest
import torch

from lengthwise.core.processes import ctrl_c_between_forks, end_with_parent, let_threads_end
from lengthwise.run.launch import threads_of_each

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.exhaustive
def test_a_running_thread_is_waited_for_but_not_for_ever():
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            torch.mm(torch.ones(300, 300), torch.ones(300, 300))

    thread = threading.Thread(target=spin)
    thread.start()
    begin = time.monotonic()
    let_threads_end()
    waited = time.monotonic() - begin
    stop.set()
    thread.join()
    assert 0.01 <= waited < 5, "the second that it is given, on a machine that may be busy"


def test_ranks_share_the_cores_unless_the_environment_says_how_many_threads(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as torch does at its import what this says
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of_each(2) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (threads_of_each(2), threads_of_each(8)) == (3, 1)


def test_a_child_whose_parent_is_gone_ends():
    child = os.fork()
    if child == 0:
        end_with_parent(os.getppid() + 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def interrupted(fork):
    with ctrl_c_between_forks():
        assert fork(lambda: os.kill(os.getpid(), signal.SIGINT)) == "forked"
        time.sleep(10)


def test_ctrl_c_amid_a_fork_comes_after_it():
    """Once an interrupted preparation of two processes hung: a lock of logging's stayed held."""
    before, found = signal.signal(signal.SIGINT, signal.default_int_handler), {}
    exec(compile("def fork(kill):\n    kill()\n    return 'forked'", "/multiprocess/popen_fork.py", "exec"), found)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(found["fork"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
