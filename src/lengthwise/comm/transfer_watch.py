"""Detects transfers between GPUs that do not end.

On NCCL `wait` only orders streams: a rank whose peer is gone runs on, then waits forever. A thread looks once a second
at the calls under way and reports the oldest overdue one with its phase. The host may be a step ahead, so time runs
from when the device could begin a call. If the driver does not answer a query, no Python runs any more: faulthandler,
which needs none, then writes all stacks and ends the process.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

GRACE_SECONDS = 60.0  # after the time-out, until an unanswered query ends the process


class Handle(Protocol):
    """The handle of a posted call."""

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        ...


class Event(Protocol):
    """A point in a device's stream."""

    def query(self) -> bool:
        """Return whether the device has reached it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A call under way: its handle, the event before it, its phase of the step, and the ranks that must answer."""

    handle: Handle
    reached: Event
    phase: str
    others: str


class Overdue:
    """Decides which call is overdue, from the states of calls under way at points in time."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._under_way: deque[Posted] = deque()
        self._began_seconds: float | None = None  # when the oldest call was first seen to have begun

    def add(self, posted: Sequence[Posted]) -> None:
        """Add calls that were just posted."""
        self._under_way.extend(posted)

    def look(self, now_seconds: float) -> Posted | None:
        """Return the oldest call under way if it has taken longer than the time-out, else None."""
        # Calls of a rank end nearly in the order posted, so those behind an unfinished one can wait.
        while self._under_way and self._under_way[0].handle.is_completed():
            self._under_way.popleft()
            self._began_seconds = None
        if not self._under_way:
            return None
        if self._began_seconds is None and self._under_way[0].reached.query():
            self._began_seconds = now_seconds
        return self._under_way[0] if self.due_in(now_seconds) <= 0 else None

    @property
    def is_waiting(self) -> bool:
        """Whether calls were under way at the last look."""
        return bool(self._under_way)

    def due_in(self, now_seconds: float) -> float:
        """Return the seconds until the oldest call is overdue; infinity if it was not seen to begin."""
        if self._began_seconds is None:
            return float("inf")
        return self._began_seconds + self._timeout_seconds - now_seconds


class TransferWatch:
    """Calls `overdue` once, from its own thread, with the oldest call that took longer than `timeout_seconds`.

    poll_seconds: time between looks. begin: function that the thread calls first. ends_frozen: True ends the process,
    by `faulthandler.dump_traceback_later`, if a look takes longer than the time-out plus `grace_seconds`.
    """

    def __init__(
        self,
        timeout_seconds: float,
        overdue: Callable[[Posted], None],
        *,
        poll_seconds: float = 1.0,
        begin: Callable[[], None] | None = None,
        ends_frozen: bool = False,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._overdue, self._poll_seconds, self._begin = overdue, poll_seconds, begin
        self._frozen_seconds = timeout_seconds + grace_seconds if ends_frozen else None
        self._calls = Overdue(timeout_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def add(self, handles: Sequence[Handle], *, reached: Event, phase: str, others: str) -> None:
        """Watch calls that were just posted. reached: the device's event right before them."""
        self._calls.add([Posted(handle=handle, reached=reached, phase=phase, others=others) for handle in handles])

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        if self._begin is not None:
            self._begin()
        try:
            self._look()
        finally:
            if self._frozen_seconds is not None:
                faulthandler.cancel_dump_traceback_later()

    def _give_time(self) -> None:
        """Postpone the end of the process by faulthandler, until this method is called again."""
        if self._frozen_seconds is None or sys.__stderr__ is None:
            return
        if self._calls.is_waiting:
            faulthandler.dump_traceback_later(self._frozen_seconds, exit=True, file=sys.__stderr__)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._ended.wait(max(0.0, min(self._poll_seconds, self._calls.due_in(time.monotonic())))):
            self._give_time()
            try:
                late = self._calls.look(time.monotonic())
            except RuntimeError:  # the device has failed; the main thread will raise it
                return
            if late is not None:
                self._overdue(late)
                return
