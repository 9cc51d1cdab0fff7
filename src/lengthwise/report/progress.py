"""Progress: one line that replaces itself on a terminal, or a plain line every ten seconds elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from lengthwise.core.errors import printable
from lengthwise.report.figures import clock

_LIVE_SECONDS, _PLAIN_SECONDS = 0.2, 10.0  # between two lines of progress, on a terminal and elsewhere
_SILENT_SECONDS = 2.0  # without a line, after which the phase of work is shown
_LOOK_SECONDS = 0.25
_PARTS = re.compile(r"(\d+) of (\d+)")


class LiveLine:
    """Writes lines to `stream`, from any thread, and a live line below them; a stream that fails ends only these."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._open = False
        self._lock = threading.Lock()
        self._updated_at, self.written_at = -math.inf, -math.inf  # of the last live line, of the last that stays

    @property
    def width(self) -> int | None:
        """Number of columns of the terminal; None if the stream is not a terminal."""
        return shutil.get_terminal_size().columns if self._live else None

    def update(self, line: str) -> None:
        """Replace the live line; without a terminal, write it if nothing was written for ten seconds."""
        now = time.monotonic()
        since = self._updated_at if self._live else max(self._updated_at, self.written_at)
        if now - since < (_LIVE_SECONDS if self._live else _PLAIN_SECONDS):
            return
        line, self._updated_at = printable(line), now
        with self._lock:
            if self._live:
                width = (self.width or 0) - 1
                self._put("\r\x1b[K" + (line if len(line) <= width else line[: max(0, width - 3)] + "..."))
                self._open = True
            else:
                self._put(f"{line}\n")

    def write(self, line: str) -> None:
        """Write lines that are not replaced."""
        with self._lock:
            self._erase()
            self._put("".join(f"{printable(each)}\n" for each in line.split("\n")))
            self.written_at = time.monotonic()

    def close(self) -> None:
        """Erase the live line."""
        with self._lock:
            self._erase()

    def _erase(self) -> None:
        if self._open:
            self._put("\r\x1b[K")
            self._open = False

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        """Discard later output: the rest of the stream's buffer would fail again."""
        with contextlib.suppress(OSError):
            print(f"progress is no longer shown: {error.strerror or error}; the run goes on", file=sys.stderr)
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


class PhaseLine:
    """Shows the phase of work, its time so far and the time left, from a thread, while nothing else is written."""

    def __init__(self, line: LiveLine) -> None:
        self._line, self._ended, self._thread = line, threading.Event(), None
        self._phase, self._group, self._began = "", "", 0.0
        self.silent_seconds = _SILENT_SECONDS  # without a line, before a phase is shown

    def note(self, phase: str) -> None:
        """Begin a phase, for example `step 3, microbatch 2 of 8`; an empty phase ends the work."""
        if not phase:
            self.close()
            return
        group = _PARTS.split(phase)[0]
        if group != self._group or not self._phase:
            self._group, self._began = group, time.monotonic()
        self._phase = phase
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._look, name="progress", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, and show nothing until the next phase."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._phase = None, ""
        self._line.close()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - max(self._line.written_at, self._began) >= self.silent_seconds:
                self._line.update(phase_text(self._phase, now - self._began))


def phase_text(phase: str, seconds: float) -> str:
    """Return how long a phase has taken, and how long its other parts may take."""
    parts, left = _PARTS.search(phase), ""
    if parts is not None and (done := int(parts[1]) - 1) > 0:
        left = f", about {clock(seconds / done * (int(parts[2]) - done))} left"
    return f"{phase}: {clock(seconds)}{left}"


@contextlib.contextmanager
def showing(phase: str, stream: TextIO) -> Iterator[PhaseLine]:
    """Show the phase of a block that takes over two seconds."""
    phases = PhaseLine(LiveLine(stream))
    phases.note(phase)
    try:
        yield phases
    finally:
        phases.close()
