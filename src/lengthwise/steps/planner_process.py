"""The planner beside rank 0, as a process of its own: both ends of its pipes.

A thread would do the same work, but hold Python's lock against the thread that launches kernels
(`python benchmarks/plan_ahead.py`). The process imports no torch: 35 MB, 0.3 s.

Its standard input takes pickled (`StepPlanning`, lengths); a pipe of its own, whose number is its argument, gives for
each a pickled (plan file, seconds), or the LengthwiseError that there is instead. Standard output is for whatever else
prints there, a `sitecustomize.py` before any line of ours. Both pipes belong to the two processes alone, so pickles are
safe here. The end of standard input ends the process, also while it plans: whoever asked is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from queue import SimpleQueue

from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.steps.step_planning import StepPlanning

_STANDARD_ERROR = 2
_GRACE_SECONDS = 3.0  # for the status of a process whose pipe is closed


class PlannerProcess:
    """Makes plans in a process of its own, one at a time; any thread may ask.

    It starts at once and can plan after 0.3 s. A context manager: its end ends the process.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        # It imports from where this process does: not from the working folder, which may hold a user's `queue.py`.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Ctrl-C is for those who train: they finish their step, and that needs plans. What is blocked stays blocked in
        # the new process, from its first instruction on; the end of its input ends it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this module, a number
                [sys.executable, "-m", "lengthwise.steps.planner_process", str(writing)],
                stdin=subprocess.PIPE,
                stdout=_STANDARD_ERROR,
                pass_fds=[writing],
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            )
        finally:
            os.close(writing)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def __enter__(self) -> PlannerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, planning: StepPlanning, lengths: Sequence[int]) -> tuple[str, float]:
        """Return the plan file of one step, which was checked, and the seconds that it took.

        Raises:
            LengthwiseError: what `planning` raised, or RankError: the process is gone.
        """
        asked, answers = self._process.stdin, self._answers
        assert asked is not None, "stdin is a pipe"
        with self._asking:
            try:
                pickle.dump((planning, tuple(lengths)), asked)
                asked.flush()
                answer = pickle.load(answers)  # noqa: S301 - of our own process
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                raise self._gone() from None
        if isinstance(answer, LengthwiseError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, also while it plans."""
        self._process.kill()
        self._process.wait()
        with self._asking:  # who was waiting for an answer gets its error now
            for pipe in filter(None, (self._process.stdin, self._answers)):
                with contextlib.suppress(BrokenPipeError):  # what was still to be written has no reader
                    pipe.close()

    def _gone(self) -> RankError:
        try:
            status = self._process.wait(_GRACE_SECONDS)
            got = f"its end by signal {-status}" if status < 0 else f"its end with status {status}"
        except subprocess.TimeoutExpired:
            got = "a broken pipe"
        remedy = "See what it printed, and whether the machine ran out of memory; then start again."
        return RankError("rank 0, planner process", expected="a plan", got=got, remedy=remedy)


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(int(sys.argv[1]), "wb")
    requests: SimpleQueue[tuple[StepPlanning, tuple[int, ...]]] = SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    try:
        while True:
            pickle.dump(_answer(*requests.get()), answers)
            answers.flush()
    except BrokenPipeError:  # whoever asked is gone
        os._exit(0)
    except Exception:  # noqa: BLE001 - a mistake of ours, told as Python would; its own end aborts on the reader's lock
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _read(requests: SimpleQueue[tuple[StepPlanning, tuple[int, ...]]]) -> None:
    while True:
        try:
            requests.put(pickle.load(sys.stdin.buffer))  # noqa: S301 - of the process that started this one
        except (EOFError, pickle.UnpicklingError):  # the asking process closed the pipe, or died while it wrote
            os._exit(0)


def _answer(planning: StepPlanning, lengths: tuple[int, ...]) -> tuple[str, float] | LengthwiseError:
    start = time.perf_counter()
    try:
        plan = planning.plan(lengths)
    except LengthwiseError as error:
        return error
    return plan.to_json(), time.perf_counter() - start


if __name__ == "__main__":
    main()
