"""Writes that survive a full or failing disk: they wait in memory, in order, and are tried again.

No line is lost or out of order: one that was written in part is removed first. Three failures in a row, some seconds
apart, are an error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

MOST_FAILURES = 3
_BETWEEN_TRIES_SECONDS = 10.0


class Writes:
    """Appends to files of one folder. note: called with a file that could not be written."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._failures, self._next_try = 0, 0.0

    def append(self, name: str, content: bytes) -> None:
        """Append bytes to a file now or, after a failure, at a later call.

        Raises:
            OSError: this is the third failure in a row.
        """
        self._waiting.append((name, content))
        if time.monotonic() >= self._next_try:
            self._try()

    def finish(self) -> None:
        """Write everything that waits, with some seconds between tries.

        Raises:
            OSError: this is the third failure in a row.
        """
        while self._waiting:
            time.sleep(max(0.0, self._next_try - time.monotonic()))
            self._try()

    def _try(self) -> None:
        try:
            while self._waiting:
                _append_whole(self._folder / self._waiting[0][0], self._waiting[0][1])
                self._waiting.popleft()
        except OSError as error:
            self._failures += 1
            self._next_try = time.monotonic() + _BETWEEN_TRIES_SECONDS
            if self._failures >= MOST_FAILURES:
                raise
            self._note(f"not written yet: {self._folder / self._waiting[0][0]}: {error.strerror or error}")
        else:
            self._failures, self._next_try = 0, 0.0


def insist(write: Callable[[], None], failed: Callable[[Exception], None], kind: type[Exception]) -> None:
    """Call `write` until it succeeds, at most three times, some seconds apart; `failed` gets the errors before."""
    for _ in range(MOST_FAILURES - 1):
        try:
            return write()
        except kind as error:
            failed(error)
            time.sleep(_BETWEEN_TRIES_SECONDS)
    return write()


def _append_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # someone may have removed it
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            written = 0
            while written < len(content):
                written += file.write(content[written:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise
