"""Processes that tokenize: results come in order, and the end of a process loses nothing. They end with their parent.

A process without progress at its task for a time, because it is stopped or its disk does not answer, is an error. Linux
shows progress; elsewhere the parent waits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

from lengthwise.core.errors import RankError
from lengthwise.core.processes import end_with_parent, kill_workers, let_threads_end
from lengthwise.data.tokens import Runner

_AT_ONCE = 4  # tasks per process: running, next, or finished and waiting for an earlier one
_STUCK_SECONDS, _LOOK_SECONDS = 120.0, 1.0
_IDLE = -1
_ENDS = 3  # ends of processes at one task that make an error

_at: Any = None  # in a worker: process id and number of its task, in memory shared with its parent


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_processes(
    number: int, *, timeout_seconds: float = _STUCK_SECONDS, start: Literal["fork", "spawn"] = "fork"
) -> Runner:
    """Return a runner that computes tasks in `number` processes; 1 means in this process.

    timeout_seconds: longest time of a process without progress, then RankError. start: `fork` needs a process of one
    thread. An error of a task ends all processes.
    """
    if number == 1:
        return map

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        pool = _Pool(number, timeout_seconds, start)
        waiting = deque[_Task]()
        try:
            for place, task in enumerate(tasks):
                waiting.append(_Task(place, function, task))
                pool.submit(waiting[-1])
                while waiting and (len(waiting) >= _AT_ONCE * number or waiting[0].future.done()):
                    yield pool.result(waiting)
            while waiting:
                yield pool.result(waiting)
        finally:  # also after Ctrl-C
            pool.close()

    return run


class _Task:
    future: Future[Any]

    def __init__(self, place: int, function: Callable[[Any], Any], content: Any) -> None:
        self.place, self.function, self.content, self.ends = place, function, content, 0


class _Pool:
    """Processes with their tasks.

    Time without progress is a sum of short times between looks, because this process may have been stopped as well.
    """

    def __init__(self, number: int, timeout_seconds: float, start: str) -> None:
        self._number, self._timeout_seconds, self._context = number, timeout_seconds, multiprocessing.get_context(start)
        self._last = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        if self._context.get_start_method() == "fork":
            let_threads_end()
        self._places: Sequence[Any] = [self._context.RawArray("q", [0, _IDLE]) for _ in range(self._number)]
        self._seen, self._still = [""] * self._number, [0.0] * self._number
        self._idle, self._next = 0.0, None  # time without any process at a task; the task that should begin
        free: Any = self._context.SimpleQueue()
        for place in range(self._number):
            free.put(place)
        arguments = os.getpid(), self._places, free
        self._pool = ProcessPoolExecutor(self._number, mp_context=self._context, initializer=_start, initargs=arguments)

    def submit(self, task: _Task) -> None:
        """Submit a task; if a process has ended, `result` submits it again."""
        try:
            task.future = self._pool.submit(_do, task.function, task.place, task.content)
        except BrokenProcessPool as error:
            task.future = Future()
            task.future.set_exception(error)

    def result(self, waiting: deque[_Task]) -> Any:
        """Remove the first task, and return its result."""
        first = waiting[0]
        while True:
            if not wait([first.future], _LOOK_SECONDS).done:
                self._refuse_stuck(waiting)
                continue
            try:
                found = first.future.result()
                waiting.popleft()
                return found
            except BrokenProcessPool:
                first.ends += 1
                if first.ends == _ENDS:
                    expected, got = (
                        f"processes that live while {first.content}",
                        f"the end of {_ENDS}, perhaps for memory",
                    )
                    remedy = "Take fewer with {workers}, or take the rows out; what is prepared stays."
                    raise RankError("tokenizing", expected=expected, got=got, remedy=remedy) from None
                self._begin_again(waiting)

    def _begin_again(self, waiting: Iterable[_Task]) -> None:
        """Restart the processes for all tasks without a result, because the end of one ends the pool."""
        self.close()
        self._begin()
        for task in waiting:
            if not task.future.done() or task.future.exception() is not None:
                self.submit(task)

    def _refuse_stuck(self, waiting: Sequence[_Task]) -> None:
        """Raise RankError for a process without progress at its task, or none at a task, for longer than the time-out.

        A stopped process that waits for a task keeps tasks from the others.
        """
        now = time.monotonic()
        spent, self._last = min(now - self._last, 2 * _LOOK_SECONDS), now
        next_one = waiting[0].place if all(place == _IDLE for _, place in self._places) else None
        self._idle = self._idle + spent if next_one is not None and next_one == self._next else 0.0
        self._next = next_one
        remedy = "Check whether it is stopped and its disk answers; the same command continues with what is there."
        if self._idle > self._timeout_seconds:
            expected = f"a process that begins {waiting[0].content} in {self._timeout_seconds:g} s"
            raise RankError("tokenizing", expected=expected, got="none", remedy=remedy)
        for number, (process, place) in enumerate(self._places):
            doing = "" if place == _IDLE else f"{place} {_activity(process)}"
            self._still[number] = self._still[number] + spent if doing and doing == self._seen[number] else 0.0
            self._seen[number] = doing
            if self._still[number] > self._timeout_seconds:
                task = next((task.content for task in waiting if task.place == place), "ending")
                expected = f"progress of process {process} in {self._timeout_seconds:g} s, which is {task}"
                raise RankError("tokenizing", expected=expected, got="none", remedy=remedy)

    def close(self) -> None:
        kill_workers(self._pool)
        self._pool.shutdown(wait=True, cancel_futures=True)


def _activity(process: int) -> str:
    """Return times and page faults of a process, which change with its progress."""
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
    """Leave Ctrl-C to the parent, and end with it; tokenizers use one thread, because each core has a process."""
    global _at
    _at = places[free.get()]
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
