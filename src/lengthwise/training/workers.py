"""Processes that prepare data: one a core, forked, which end with the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from lengthwise.core.errors import RankError
from lengthwise.core.processes import end_with_parent, kill_workers, let_threads_end
from lengthwise.data.shards import Runner

_AT_ONCE = 2  # tasks a process has at hand: one that it works on, and the next


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def worker_processes(number: int) -> Iterator[Runner]:
    """Give what runs tasks in so many processes; one: in this one. An error of a task ends all of them."""
    if number == 1:
        yield map
        return
    let_threads_end()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_start, initargs=(os.getpid(),))

    def run(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterable[Any]:
        waiting = iter(tasks)
        futures = {pool.submit(function, task) for task in islice(waiting, _AT_ONCE * number)}
        while futures:
            done = next(as_completed(futures))
            futures.remove(done)
            futures |= {pool.submit(function, task) for task in islice(waiting, 1)}
            yield done.result()

    try:
        yield run
    except BaseException as error:  # Ctrl-C, too: a shard takes minutes where data are large
        kill_workers(pool)
        if not isinstance(error, BrokenProcessPool):
            raise
        expected, got = "all processes that prepare data to live", "one that was killed, perhaps for its memory"
        remedy = "Take fewer with {workers}; what is prepared stays, and the same command goes on."
        raise RankError("prepare", expected=expected, got=got, remedy=remedy) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it; tokenizers' own threads would only fight for the same cores."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
