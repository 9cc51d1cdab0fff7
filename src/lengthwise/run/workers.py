"""Processes that prepare data: one a core, forked, which end with the process that started them.

One that has a task and does nothing for a time, as a stopped one or one whose disk does not answer, is an error. Linux
says whether it does anything; elsewhere it is waited for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

from lengthwise.core.errors import RankError
from lengthwise.core.processes import end_with_parent, kill_workers, let_threads_end
from lengthwise.data.prepare import Runner

_AT_ONCE = 2  # tasks a process has at hand: one that it works on, and the next
_STUCK_SECONDS, _LOOK_SECONDS = 120.0, 1.0
_IDLE = -1

_at: Any = None  # in a worker: its process id and the number of its task, in memory that its parent sees


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def worker_processes(number: int, *, timeout_seconds: float = _STUCK_SECONDS) -> Iterator[Runner]:
    """Give what runs tasks in so many processes; one: in this one. An error of a task ends all of them.

    timeout_seconds: how long a process may do nothing at its task before it is named in a RankError.
    """
    if number == 1:
        yield map
        return
    let_threads_end()
    context = multiprocessing.get_context("fork")
    places = [context.RawArray("q", [0, _IDLE]) for _ in range(number)]
    free: Any = context.SimpleQueue()
    for place in range(number):
        free.put(place)
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_start, initargs=(os.getpid(), places, free))

    def run(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterable[Any]:
        waiting, looks = iter(enumerate(tasks)), _Looks(places, timeout_seconds)
        futures = {pool.submit(_do, function, *task) for task in islice(waiting, _AT_ONCE * number)}
        while futures:
            finished, _ = wait(futures, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED)
            looks.refuse_stuck(tasks)
            for done in finished:
                futures.remove(done)
                futures |= {pool.submit(_do, function, *task) for task in islice(waiting, 1)}
                yield done.result()

    try:
        yield run
    except BrokenProcessPool:
        expected, got = "all processes that prepare data to live", "one that was killed, perhaps for its memory"
        remedy = "Take fewer with {workers}; what is prepared stays, and the same command continues."
        raise RankError("prepare", expected=expected, got=got, remedy=remedy) from None
    finally:  # after Ctrl-C, too: a file takes minutes where data are large
        kill_workers(pool)
        pool.shutdown(wait=True, cancel_futures=True)


class _Looks:
    """Looks at what processes do, from time to time; how long one did nothing is a sum of short times between looks, as
    this process may have been stopped as well.
    """

    def __init__(self, places: Sequence[Any], timeout_seconds: float) -> None:
        self._places, self._timeout_seconds, self._last = places, timeout_seconds, time.monotonic()
        self._seen, self._still = [""] * len(places), [0.0] * len(places)

    def refuse_stuck(self, tasks: Sequence[Any]) -> None:
        """Raise RankError for a process that has done nothing at its task for longer than the time-out."""
        now = time.monotonic()
        spent, self._last = min(now - self._last, 2 * _LOOK_SECONDS), now
        for place, (process, task) in enumerate(self._places):
            doing = "" if task == _IDLE else f"{task} {_activity(process)}"
            self._still[place] = self._still[place] + spent if doing and doing == self._seen[place] else 0.0
            self._seen[place] = doing
            if self._still[place] > self._timeout_seconds:
                expected = f"progress of process {process} in {self._timeout_seconds:g} s, which is {tasks[task]}"
                remedy = (
                    "Check whether it is stopped and its disk answers; the same command continues with what is there."
                )
                raise RankError("prepare", expected=expected, got="none", remedy=remedy)


def _activity(process: int) -> str:
    """Return what differs whenever a process has done anything: times and page faults; always, where none are shown."""
    try:
        return Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return str(time.monotonic())


def _do(function: Callable[[Any], Any], number: int, task: Any) -> Any:
    _at[:] = [os.getpid(), number]
    try:
        return function(task)
    finally:
        _at[1] = _IDLE


def _start(parent: int, places: Sequence[Any], free: Any) -> None:
    """Leave Ctrl-C to the parent, and end with it; tokenizers' own threads would only fight for the same cores."""
    global _at
    _at = places[free.get()]
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
