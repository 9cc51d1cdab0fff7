"""The live line of a run: one line that rewrites itself on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import TextIO

from lengthwise.core.errors import printable


class LiveLine:
    """Writes lines to `stream`. On a terminal a live line is replaced by the next one and never wraps.

    A stream that cannot be written any more (a reader that went away, a full disk) ends the lines, not the run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._open = False

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None: the stream is none."""
        return shutil.get_terminal_size().columns if self._live else None

    def update(self, line: str) -> None:
        """Show `line` in place of the live line before it."""
        if not self._live:
            self.write(line)
            return
        line = printable(line)
        width = (self.width or 0) - 1
        self._put("\r\x1b[K" + (line if len(line) <= width else line[: max(0, width - 3)] + "..."))
        self._open = True

    def write(self, line: str) -> None:
        """Write a line that stays."""
        self.close()
        self._put("".join(f"{printable(each)}\n" for each in line.split("\n")))

    def close(self) -> None:
        """Let the live line stay as it is and go on below it."""
        if self._open:
            self._put("\n")
            self._open = False

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        """Write to nowhere from now on: what is left in the stream's buffer would fail again and again."""
        with contextlib.suppress(OSError):
            print(f"progress is no longer shown: {error.strerror or error}; the run goes on", file=sys.stderr)
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
