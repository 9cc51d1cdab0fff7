"""What a process does before it starts another, and what a child does first."""

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
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
_THREADS = Path("/proc/self/task")
_LOOK_SECONDS = 0.01
_MOST_SECONDS = 1.0
_FORKING = "popen_fork.py"  # of multiprocessing, and of multiprocess, which datasets uses
_AGAIN_SECONDS = 0.1


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when process `parent` dies; do nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)


@contextlib.contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Block Ctrl-C, SIGTERM and SIGHUP inside the block, and for good in processes started in it.

    The training process handles these signals: it finishes its step, for which it needs the processes started here.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def ctrl_c_between_forks() -> Iterator[None]:
    """Let Ctrl-C wait inside the block while a process is forked, and leave it to this process alone.

    Amid a fork, KeyboardInterrupt would leave locks of other modules held for good.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, before = os.getpid(), signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # this process ends its children
        at = frame
        while at is not None:
            if os.path.basename(at.f_code.co_filename) == _FORKING:
                again = threading.Timer(_AGAIN_SECONDS, os.kill, (owner, number))
                again.daemon = True
                again.start()
                return
            at = at.f_back
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # an error while a pool ended
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def start_module(module: str, *arguments: str, stdin: int, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a module of this package in a new process, which writes to standard error."""
    # It imports from this process's paths, not from the working folder, which may hold a user's `queue.py`.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(  # noqa: S603 - a module of ours
        [sys.executable, "-m", module, *arguments],
        stdin=stdin,
        stdout=_STANDARD_ERROR,
        pass_fds=pass_fds,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )


def kill_workers(pool: ProcessPoolExecutor) -> None:
    """Kill the processes of a pool at once."""
    for process in list((pool._processes or {}).values()):  # the pool's own `kill_workers` needs Python 3.14
        process.kill()


def let_threads_end() -> None:
    """Before a fork, wait at most a second until no other thread is running or ending. Linux only.

    Python reports a thread as ended before the system does. Until then libraries (MKL) hold a lock, and matrix products
    in a forked child would wait for it forever.
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
    """Return whether this process has a single thread, so no CUDA either, and may fork. False off Linux."""
    return sys.platform == "linux" and not _other_threads()


def _other_threads() -> dict[str, str]:
    """Return the states ("R" is running) of the other threads of this process, by id."""
    states = {}
    for thread in _THREADS.iterdir():
        if int(thread.name) != threading.get_native_id():
            with contextlib.suppress(OSError):  # the thread has ended
                states[thread.name] = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return states
