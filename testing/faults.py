"""Faults for tests, set by `LENGTHWISE_FAULT=point:rank:step:action[,...]` in the environment.

`point` is one of `POINTS`; `action` is `kill` (SIGKILL), `stop` (SIGSTOP), `term` (SIGTERM), `error` (a failing disk)
or `sleep` (one second). Only the first start of a rank has faults, by the agent's count. `core/faults.py` calls
`happen` at every point.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "LENGTHWISE_FAULT"
POINTS: Mapping[str, str] = {
    "start": "after a rank has joined, before the first step (step 0, or the step from which the run resumes)",
    "microbatches": "before the microbatches of a step",
    "step-end": "after the microbatches, before the ranks share the numbers of the step",
    "update": "after the gradients were summed, before the update",
    "updated": "after the update",
    "checkpoint-copy": "before a rank copies its state",
    "checkpoint-write": "before a rank writes its file",
    "checkpoint-written": "after a rank has written its file",
    "checkpoint-manifest": "on rank 0, before it writes the manifest",
    "checkpoint-rename": "on rank 0, before it renames a whole checkpoint",
    "checkpoint-committed": "on rank 0, after it has renamed a whole checkpoint",
    "model-save": "on rank 0, while it writes the model's folder",
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
ACTIONS = (*_SIGNALS, "error", "sleep")
_SLEEP_SECONDS = 1.0


class Fault(NamedTuple):
    """One fault, at a point of a rank and step."""

    point: str
    rank: int
    step: int
    action: str


def happen(point: str, rank: int, step: int) -> None:
    """Execute the faults set for this point; raise OSError for `error`, ValueError for text that names no fault."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0:
        return
    for each in map(_read, os.environ[VARIABLE].split(",")):
        if each[:3] == (point, rank, step):
            _act(each)


def _read(text: str) -> Fault:
    point, rank, step, action = text.split(":")
    if point not in POINTS or action not in ACTIONS:
        raise ValueError(f"{VARIABLE} has {text!r}; points are {', '.join(POINTS)}, actions {', '.join(ACTIONS)}")
    return Fault(point, int(rank), int(step), action)


def _act(asked: Fault) -> None:
    if asked.action == "error":
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}, as {VARIABLE} asks at {asked.point}")
    if asked.action == "sleep":
        time.sleep(_SLEEP_SECONDS)
        return
    signal.raise_signal(_SIGNALS[asked.action])  # to this thread: os.kill may reach another thread, later
