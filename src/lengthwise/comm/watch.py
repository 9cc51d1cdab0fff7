"""Notices transfers between GPUs that do not end.

On NCCL `wait` only orders streams: a rank whose peer is gone runs on until it next needs a number on the host, and
there it waits for ever, or until NCCL's own watchdog kills it without a word of step or phase. This thread looks at
what is under way once a second, and reports the oldest that is overdue, with the phase it was posted in.

The host may be a whole step ahead of the device. So a call's time runs from when the device could begin it: when it was
the oldest under way, and the stream that posted it had come there.
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


class Event(Protocol):
    """A point in what a device was given."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A call under way: who must answer, in words, where in the step it was posted, and what came before it."""

    handle: Handle
    reached: Event
    phase: str
    others: str


class Overdue:
    """Decides which call is overdue, from what is seen of the calls under way at points in time."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._under_way: deque[Posted] = deque()
        self._began_seconds: float | None = None  # when the oldest was first seen to be begun

    def add(self, posted: Sequence[Posted]) -> None:
        """Take note of calls that were posted just now."""
        self._under_way.extend(posted)

    def look(self, now_seconds: float) -> Posted | None:
        """Return the oldest call under way, if it has taken longer than the time-out."""
        # Calls of a rank end nearly in the order posted: those behind an unfinished one are looked at later.
        while self._under_way and self._under_way[0].handle.is_completed():
            self._under_way.popleft()
            self._began_seconds = None
        if not self._under_way:
            return None
        if self._began_seconds is None and self._under_way[0].reached.query():
            self._began_seconds = now_seconds
        return self._under_way[0] if self.due_in(now_seconds) <= 0 else None

    def due_in(self, now_seconds: float) -> float:
        """Return in how many seconds the oldest call is overdue; infinity where none was seen to be begun."""
        if self._began_seconds is None:
            return float("inf")
        return self._began_seconds + self._timeout_seconds - now_seconds


class Watch:
    """Calls `overdue` once, from a thread of its own, with the oldest call that took longer than `timeout_seconds`.

    That is at most `poll_seconds` after the time-out.
    """

    def __init__(self, timeout_seconds: float, overdue: Callable[[Posted], None], *, poll_seconds: float = 1.0) -> None:
        self._overdue, self._poll_seconds = overdue, poll_seconds
        self._calls = Overdue(timeout_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def add(self, handles: Sequence[Handle], *, reached: Event, phase: str, others: str) -> None:
        """Watch over calls that were posted just now, when the device had `reached` still before it."""
        self._calls.add([Posted(handle=each, reached=reached, phase=phase, others=others) for each in handles])

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(max(0.0, min(self._poll_seconds, self._calls.due_in(time.monotonic())))):
            try:
                late = self._calls.look(time.monotonic())
            except RuntimeError:  # the device has failed: the main thread hears of it by itself
                return
            if late is not None:
                self._overdue(late)
                return
