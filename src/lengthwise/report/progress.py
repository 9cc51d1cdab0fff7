"""The live line of a run: one line that rewrites itself on a terminal, plain lines anywhere else."""

from __future__ import annotations

import shutil
from typing import TextIO


class LiveLine:
    """Writes lines to `stream`. On a terminal a live line is replaced by the next one and never wraps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._open = False

    def update(self, line: str) -> None:
        """Show `line` in place of the live line before it."""
        if not self._live:
            self.write(line)
            return
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + (line if len(line) <= width else line[: max(0, width - 3)] + "..."))
        self._stream.flush()
        self._open = True

    def write(self, line: str) -> None:
        """Write a line that stays."""
        self.close()
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Let the live line stay as it is and go on below it."""
        if self._open:
            self._stream.write("\n")
            self._open = False
