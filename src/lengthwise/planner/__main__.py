"""`python -m lengthwise.planner`: plans for a process that must not stall, one after the other, through two pipes.

Training starts it beside rank 0 (`training/planner_process.py`). A thread there would do the same work, but hold
Python's lock against the thread that launches kernels (`python benchmarks/plan_ahead.py`). No torch: 35 MB, 0.3 s.

Standard input holds pickled keywords of `plan_step`; standard output gets, for each, a pickled (plan file, seconds), or
the LengthwiseError that there is instead. Both pipes belong to the two processes alone, so pickles are safe here. The
end of standard input ends the process, also while it plans: whoever asked is gone.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from queue import SimpleQueue
from typing import Any

from lengthwise.core.errors import LengthwiseError
from lengthwise.planner.api import plan_step
from lengthwise.program.check import check_plan


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anyone prints must not mix with the answers
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    try:
        while True:
            pickle.dump(_answer(requests.get()), answers)
            answers.flush()
    except BrokenPipeError:  # whoever asked is gone
        os._exit(0)
    except Exception:  # noqa: BLE001 - a mistake of ours, told as Python would; its own end aborts on the reader's lock
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _read(requests: SimpleQueue[dict[str, Any]]) -> None:
    while True:
        try:
            requests.put(pickle.load(sys.stdin.buffer))  # noqa: S301 - of the process that started this one
        except (EOFError, pickle.UnpicklingError):  # the asking process closed the pipe, or died while it wrote
            os._exit(0)


def _answer(keywords: dict[str, Any]) -> tuple[str, float] | LengthwiseError:
    start = time.perf_counter()
    try:
        plan = plan_step(**keywords)
        check_plan(plan)
    except LengthwiseError as error:
        return error
    return plan.to_json(), time.perf_counter() - start


if __name__ == "__main__":
    main()
