"""The searches of `lengthwise simulate`, a planner each, in processes that end with the command, however it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING

from lengthwise.core.errors import MemoryShortage
from lengthwise.core.processes import end_with_parent, kill_workers
from lengthwise.report.progress import LiveLine, showing

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from lengthwise.simulator import Best, Mesh, MeshQuestion

_TOLD_EVERY_SECONDS = 0.2
_SLOW = ("lengthwise", "bytescale", "single-degree")


def search_meshes(planners: Sequence[str], batches: Sequence[Sequence[int]], question: MeshQuestion) -> list[Best]:
    """Search for each planner; in as many processes as there are cores, where a fork is safe.

    Raises:
        MemoryShortage: a process was ended from outside, which the system does when memory runs out.
    """
    from lengthwise.simulator import best_mesh

    workers = min(os.cpu_count() or 1, len(planners))
    if workers > 1 and sys.platform == "linux" and threading.active_count() == 1:
        return _searched_in_processes(workers, planners, batches, question)
    with showing("planning", sys.stderr) as phases:

        def tell(planner: str, mesh: Mesh, tried: int) -> None:
            place = f"planner {planners.index(planner) + 1} of {len(planners)}"
            phases.note(f"{place}, {planner}: {_doing(mesh, tried)}")

        return [best_mesh(planner, batches, question, progress=tell) for planner in planners]


def _searched_in_processes(
    workers: int, planners: Sequence[str], batches: Sequence[Sequence[int]], question: MeshQuestion
) -> list[Best]:
    line = LiveLine(sys.stderr)
    at_work: dict[str, str] = {}
    context = get_context("fork")
    told = context.SimpleQueue()
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(told, batches, question, os.getpid())
    )
    try:
        slowest_first = [*filter(planners.__contains__, _SLOW), *(each for each in planners if each not in _SLOW)]
        searches = {pool.submit(_search_and_tell, planner): planner for planner in slowest_first}
        waiting = set(searches)
        while waiting:
            done, waiting = wait(waiting, timeout=_TOLD_EVERY_SECONDS, return_when=FIRST_COMPLETED)
            for search in done:
                search.result()
            while not told.empty():
                planner, doing = told.get()
                at_work[planner] = doing
            left = {searches[search] for search in waiting}
            now = [f"{planner}: {doing}" for planner, doing in at_work.items() if planner in left]
            line.update("; ".join([f"{len(planners) - len(left)} of {len(planners)} planners done", *now]))
        found = {planner: search.result() for search, planner in searches.items()}
    except BrokenProcessPool:
        expected, got = "each planner's process to finish its search", "one that was killed before"
        remedy = "The system does so when memory runs out: give fewer devices or --planners, or --mesh same."
        raise MemoryShortage("search of meshes", expected=expected, got=got, remedy=remedy) from None
    finally:
        line.close()
        _end(pool)
    return [found[planner] for planner in planners]


def _end(pool: ProcessPoolExecutor) -> None:
    """End the processes where they stand: after Ctrl-C nobody waits for a search."""
    kill_workers(pool)
    pool.shutdown(wait=True, cancel_futures=True)


_work: tuple[SimpleQueue[tuple[str, str]], Sequence[Sequence[int]], MeshQuestion] | None = None  # of a worker


def _start_worker(
    told: SimpleQueue[tuple[str, str]], batches: Sequence[Sequence[int]], question: MeshQuestion, parent: int
) -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the command, and end when that does."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    _work = told, batches, question


def _search_and_tell(planner: str) -> Best:
    """Search for one planner in a worker, and tell what is planned."""
    from lengthwise.simulator import best_mesh

    assert _work is not None, "a worker that was not started"
    told, batches, question = _work
    return best_mesh(
        planner, batches, question, progress=lambda name, mesh, tried: told.put((name, _doing(mesh, tried)))
    )


def _doing(mesh: Mesh, tried: int) -> str:
    """Say it in a few words, as a line of a terminal has several of them."""
    return f"plan {tried + 1} (TP {mesh.tensor}, PP {mesh.stages}, {mesh.capacity_share:g} of what fits)"
