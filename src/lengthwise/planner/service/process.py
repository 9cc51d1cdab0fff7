"""The planner process beside rank 0: both ends of its pipes (docs/decisions/planner-process.md).

One pipe takes pickled (`StepPlanning`, lengths, shared prefixes, images); the other answers each with a pickled (plan
file, seconds) or a LengthwiseError. Only these two processes have the pipes, so pickles are safe. Closing the first
pipe ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import BinaryIO, TypeAlias

from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.core.plan import Images
from lengthwise.core.prefixes import SharedPrefixes
from lengthwise.core.processes import end_with_parent, ending_signals_blocked, has_one_thread, start_module
from lengthwise.planner.service.step_planning import StepPlanning

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_GRACE_SECONDS = 3.0  # wait for the exit status of a process whose pipe is closed

_Request: TypeAlias = tuple[StepPlanning, tuple[int, ...], SharedPrefixes | None, Images]


class PlannerProcess:
    """Makes plans in its own process, one at a time, for any thread. Starts at once; ends with its context.

    forks: True if this process is ours, and may be forked while it has one thread only.
    """

    def __init__(self, *, forks: bool = False) -> None:
        self._asking, self._owner = threading.Lock(), os.getpid()
        reading, asking = os.pipe()
        answers, writing = os.pipe()
        try:
            start = _fork if forks and has_one_thread() else _start
            with ending_signals_blocked():  # the end of its input ends it
                self._kill, self._status = start(reading, writing)
        finally:
            os.close(reading)
            os.close(writing)
        self._requests, self._answers = os.fdopen(asking, "wb"), os.fdopen(answers, "rb")

    def __enter__(self) -> PlannerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(
        self,
        planning: StepPlanning,
        lengths: Sequence[int],
        shared: SharedPrefixes | None = None,
        images: Images = (),
    ) -> tuple[str, float]:
        """Return (checked plan file, seconds) of one step. shared, images: as in `StepPlanning.plan`.

        Raises:
            LengthwiseError: planning raised it.
            RankError: the process is gone.
        """
        with self._asking:
            try:
                pickle.dump((planning, tuple(lengths), shared, images), self._requests)
                self._requests.flush()
                answer = pickle.load(self._answers)  # noqa: S301 - from our own process
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                raise self._gone() from None
        if isinstance(answer, LengthwiseError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, even while it plans; a fork of its owner, which may collect a session, ends nothing."""
        if os.getpid() != self._owner:
            return
        self._kill()
        self._status(None)
        with self._asking:  # a thread that waited for an answer gets its error first
            for pipe in (self._requests, self._answers):
                with contextlib.suppress(BrokenPipeError):  # buffered data have no reader
                    pipe.close()

    def _gone(self) -> RankError:
        status = self._status(_GRACE_SECONDS)
        got = "a broken pipe" if status is None else f"its end with status {status}"
        if status is not None and status < 0:
            got = f"its end by signal {-status}"
        remedy = "See what it printed, and whether the machine ran out of memory; then start again."
        return RankError("rank 0, planner process", expected="a plan", got=got, remedy=remedy)


_Kill = Callable[[], None]
_Status = Callable[[float | None], int | None]
"""Waits for the process, at most some seconds; returns its exit status (below 0: a signal), or None."""


def _start(reading: int, writing: int) -> tuple[_Kill, _Status]:
    ends = (reading, writing)
    process = start_module(
        "lengthwise.planner.service.process", *map(str, ends), stdin=subprocess.DEVNULL, pass_fds=ends
    )

    def status(seconds: float | None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None

    return process.kill, status


def _fork(reading: int, writing: int) -> tuple[_Kill, _Status]:
    process = multiprocessing.get_context("fork").Process(
        target=_serve_forked, args=(os.getpid(), reading, writing), name="planner", daemon=True
    )
    process.start()

    def status(seconds: float | None) -> int | None:
        process.join(seconds)
        return process.exitcode

    return process.kill, status


def _serve_forked(parent: int, reading: int, writing: int) -> None:
    """Serve in a fork; close the parent's pipes, sockets and locks first."""
    end_with_parent(parent)
    gc.freeze()  # objects collected later must not close file descriptors that are reused by then
    signal.set_wakeup_fd(-1)
    sys.stdout = sys.stderr = os.fdopen(_STANDARD_ERROR, "w", buffering=1, closefd=False)
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
    first, second = sorted((reading, writing))
    os.closerange(_STANDARD_ERROR + 1, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, os.sysconf("SC_OPEN_MAX"))
    _serve(reading, writing)


def _serve(reading: int, writing: int) -> None:
    answers = os.fdopen(writing, "wb")
    requests: SimpleQueue[_Request] = SimpleQueue()
    threading.Thread(target=_read, args=(os.fdopen(reading, "rb"), requests), daemon=True).start()
    try:
        while True:
            pickle.dump(_answer(*requests.get()), answers)
            answers.flush()
    except BrokenPipeError:  # the asking process is gone
        os._exit(0)
    except Exception:  # noqa: BLE001 - our own bug, shown as Python would, whose exit aborts on the reader's lock
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _read(pipe: BinaryIO, requests: SimpleQueue[_Request]) -> None:
    while True:
        try:
            requests.put(pickle.load(pipe))  # noqa: S301 - from the process that started this one
        except (EOFError, pickle.UnpicklingError):  # the asking process closed the pipe, or died while it wrote
            os._exit(0)


def _answer(
    planning: StepPlanning, lengths: tuple[int, ...], shared: SharedPrefixes | None, images: Images
) -> tuple[str, float] | LengthwiseError:
    start = time.perf_counter()
    try:
        plan = planning.plan(lengths, shared, images)
    except LengthwiseError as error:
        return error
    return plan.to_json(), time.perf_counter() - start


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
