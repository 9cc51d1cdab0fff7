"""What is done on either side of the start of a process: before the fork, and first of all in the child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
_THREADS = Path("/proc/self/task")
_LOOK_SECONDS = 0.01
_MOST_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Let Linux kill this process when `parent`, which started it, dies; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it was asked to tell
            os._exit(1)


@contextlib.contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Block Ctrl-C, SIGTERM and SIGHUP inside the block; they stay blocked in processes that are started there.

    Those are for who trains, who finishes a step and needs these processes for it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_module(module: str, *arguments: str, stdin: int, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a module of this package in a new process, which writes to the standard error."""
    # It imports from where this process does: not from the working folder, which may hold a user's `queue.py`.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(  # noqa: S603 - a module of ours
        [sys.executable, "-m", module, *arguments],
        stdin=stdin,
        stdout=_STANDARD_ERROR,
        pass_fds=pass_fds,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )


def kill_workers(pool: ProcessPoolExecutor) -> None:
    """Kill the processes of a pool where they stand; nobody waits for what they do."""
    for process in list((pool._processes or {}).values()):  # `kill_workers` of the pool is of Python 3.14
        process.kill()


def let_threads_end() -> None:
    """Wait, before a fork, until no thread of this process is about to end; at most a second. Linux only.

    Python calls a thread ended before the system does; until then libraries (MKL) hold a lock, on which the matrix
    products of a child forked then would wait for ever.
    """
    if sys.platform != "linux":
        return
    before, end = None, time.monotonic() + _MOST_SECONDS
    while time.monotonic() < end:
        threads = _other_threads()
        if threads == before and "R" not in threads.values():
            return
        before = threads
        time.sleep(_LOOK_SECONDS)


def has_one_thread() -> bool:
    """Return whether this process has one thread, so no CUDA either, and may be forked. False off Linux."""
    return sys.platform == "linux" and not _other_threads()


def _other_threads() -> dict[str, str]:
    """Return the state ("R": running) of each other thread of this process, by its number."""
    states = {}
    for thread in _THREADS.iterdir():
        if int(thread.name) != threading.get_native_id():
            with contextlib.suppress(OSError):  # it ended meanwhile
                states[thread.name] = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return states
