"""Notices transfers between GPUs that do not end.

On NCCL `wait` only orders streams: a rank whose peer is gone runs on until it next needs a number on the host, and
there it waits for ever, or until NCCL's own watchdog kills it without a word of step or phase. This thread looks at
what is under way once a second, and reports the oldest that is overdue, with the phase it was posted in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Handle(Protocol):
    """What a posted call returns."""

    def is_completed(self) -> bool:
        """Whether it has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A call under way: who must answer, in words, and where in the step it was posted."""

    handle: Handle
    phase: str
    others: str
    posted_seconds: float


class Watch:
    """Calls `overdue` once, from a thread of its own, with the oldest call that took longer than `timeout_seconds`."""

    def __init__(self, timeout_seconds: float, overdue: Callable[[Posted], None], *, poll_seconds: float = 1.0) -> None:
        self._timeout_seconds, self._overdue, self._poll_seconds = timeout_seconds, overdue, poll_seconds
        self._under_way: deque[Posted] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def add(self, handles: Sequence[Handle], *, phase: str, others: str) -> None:
        """Watch over calls that were posted just now."""
        now = time.monotonic()
        self._under_way.extend(Posted(handle=each, phase=phase, others=others, posted_seconds=now) for each in handles)

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            # Calls of a rank end nearly in the order posted: those behind an unfinished one are looked at later.
            while self._under_way and self._under_way[0].handle.is_completed():
                self._under_way.popleft()
            if self._under_way and time.monotonic() - self._under_way[0].posted_seconds > self._timeout_seconds:
                self._overdue(self._under_way[0])
                return
