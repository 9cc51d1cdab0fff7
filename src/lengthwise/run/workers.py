"""Processes that tokenize: their answers come in order, and the end of one costs nothing. They end with their parent.

One that has a task and does nothing for a time, as a stopped one or one whose disk does not answer, is an error. Linux
says whether it does anything; elsewhere it is waited for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

from lengthwise.core.errors import RankError
from lengthwise.core.processes import end_with_parent, kill_workers, let_threads_end
from lengthwise.data.tokens import Runner

_AT_ONCE = 4  # tasks a process has at hand: that it works on, the next ones, and those that wait for an earlier one
_STUCK_SECONDS, _LOOK_SECONDS = 120.0, 1.0
_IDLE = -1
_ENDS = 3  # of processes at one task, before it is given up

_at: Any = None  # in a worker: its process id and the number of its task, in memory that its parent sees


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_processes(
    number: int, *, timeout_seconds: float = _STUCK_SECONDS, start: Literal["fork", "spawn"] = "fork"
) -> Runner:
    """Return what runs tasks in so many processes, and yields results in order; one: in this one.

    timeout_seconds: how long a process may do nothing at its task before it is named in a RankError. start: `fork` from
    a process of one thread alone. An error of a task ends all of them.
    """
    if number == 1:
        return map

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        pool = _Pool(number, timeout_seconds, start)
        waiting = deque[_Task]()
        try:
            for place, task in enumerate(tasks):
                waiting.append(_Task(place, function, task))
                pool.submit(waiting[-1], waiting)
                while waiting and (len(waiting) >= _AT_ONCE * number or waiting[0].future.done()):
                    yield pool.result(waiting)
            while waiting:
                yield pool.result(waiting)
        finally:  # after Ctrl-C, too
            pool.close()

    return run


class _Task:
    future: Future[Any]

    def __init__(self, place: int, function: Callable[[Any], Any], content: Any) -> None:
        self.place, self.function, self.content, self.ends = place, function, content, 0


class _Pool:
    """Processes with their tasks; how long one did nothing is a sum of short times between looks, as this process may
    have been stopped as well.
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
        free: Any = self._context.SimpleQueue()
        for place in range(self._number):
            free.put(place)
        arguments = os.getpid(), self._places, free
        self._pool = ProcessPoolExecutor(self._number, mp_context=self._context, initializer=_start, initargs=arguments)

    def submit(self, task: _Task, waiting: Iterable[_Task]) -> None:
        """Begin a task, after those that wait."""
        try:
            task.future = self._pool.submit(_do, task.function, task.place, task.content)
        except BrokenProcessPool:
            self._begin_again(waiting)

    def result(self, waiting: deque[_Task]) -> Any:
        """Wait for the first of some tasks, and take it from them."""
        first = waiting[0]
        while True:
            try:
                found = first.future.result(_LOOK_SECONDS)
                waiting.popleft()
                return found
            except TimeoutError:
                if first.future.done():
                    raise  # of the task
                self._refuse_stuck(waiting)
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
        """Start all processes again, since the end of one is that of the others, with all tasks that have no result."""
        self.close()
        self._begin()
        for task in waiting:
            is_done = hasattr(task, "future") and task.future.done() and task.future.exception() is None
            if not is_done:
                task.future = self._pool.submit(_do, task.function, task.place, task.content)

    def _refuse_stuck(self, waiting: Iterable[_Task]) -> None:
        """Raise RankError for a process that has done nothing at its task for longer than the time-out."""
        now = time.monotonic()
        spent, self._last = min(now - self._last, 2 * _LOOK_SECONDS), now
        for number, (process, place) in enumerate(self._places):
            doing = "" if place == _IDLE else f"{place} {_activity(process)}"
            self._still[number] = self._still[number] + spent if doing and doing == self._seen[number] else 0.0
            self._seen[number] = doing
            if self._still[number] > self._timeout_seconds:
                task = next((task.content for task in waiting if task.place == place), "ending")
                expected = f"progress of process {process} in {self._timeout_seconds:g} s, which is {task}"
                remedy = (
                    "Check whether it is stopped and its disk answers; the same command continues with what is there."
                )
                raise RankError("tokenizing", expected=expected, got="none", remedy=remedy)

    def close(self) -> None:
        """End all processes where they stand."""
        kill_workers(self._pool)
        self._pool.shutdown(wait=True, cancel_futures=True)


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
