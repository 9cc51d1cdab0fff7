"""What a benchmark finds: printed line by line, and at the end written into a page between two marks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import date
from pathlib import Path


class Findings:
    """The lines of one benchmark, whose place in a page is between <!-- name: begin --> and <!-- name: end -->."""

    def __init__(self, name: str) -> None:
        self._marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        self._lines: list[str] = []

    def tell(self, lines: Iterable[str]) -> None:
        """Print lines as they are found, and keep them."""
        for line in lines:
            print(line, flush=True)
            self._lines.append(line)

    def sign(self, about: str) -> None:
        """Tell date and machine, and what else is worth knowing of the run."""
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        self.tell(["", f"{date.today().isoformat()}, {machine}; {about}."])

    def write(self, page: Path | None) -> None:
        """Replace what stands between the marks of a page, if one is given.

        Raises:
            SystemExit: the page has no such marks.
        """
        if page is None:
            return
        text = page.read_text(encoding="utf-8")
        before, begin, rest = text.partition(self._marks[0])
        _, end, after = rest.partition(self._marks[1])
        if not end:
            raise SystemExit(f"{page} has no {' ... '.join(self._marks)}")
        page.write_text("\n".join([before + begin, *self._lines, end + after]), encoding="utf-8")
