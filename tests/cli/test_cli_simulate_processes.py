"""`lengthwise simulate` where a process of its search or the command itself comes to an end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from run.small_runs import children
from tiers import more

ENDLESS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # both may be ignored where the tests run in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from lengthwise import simulator
simulator.best_mesh = lambda *_, **__: time.sleep(600)
import os
os.cpu_count = lambda: 2
from lengthwise.cli import main
main(sys.argv[1:])
"""
SMALL = ("simulate", "--model", "llama-7b", "--ranks", "4", "--batch-tokens", "4K", "--batches", "1", "--lengths",
         "prolong", "--context", "4K", "--planners", "packed-dp,lengthwise")  # fmt: skip


def waited(is_so: Callable[[], bool], seconds: float = 90) -> bool:
    until = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < until:
        time.sleep(0.05)
    return so


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="searches in processes on Linux alone")
@pytest.mark.parametrize(
    ("to_child", "sent", "status", "told"),
    [
        more(True, signal.SIGKILL, 1, "fewer devices or --planners, or --mesh same"),
        (False, signal.SIGINT, 130, "interrupted"),
        more(False, signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_simulate_ends_with_all_its_processes(tmp_path, to_child, sent, status, told) -> None:
    run = [sys.executable, "-c", ENDLESS, *SMALL, "--out", str(tmp_path / "out")]
    command = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert waited(lambda: len(children(command.pid)) == 2)
        time.sleep(0.5)
        searching = children(command.pid)
        os.kill(searching[0] if to_child else command.pid, sent)
        said = command.communicate(timeout=30)[1]
        assert waited(lambda: not any(map(is_running, searching)))
    finally:
        command.kill()
        command.communicate()
    assert command.returncode == status
    assert told in said
    assert "Traceback" not in said
