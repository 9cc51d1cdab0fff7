"""How far a preparation of data is, as a live line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lengthwise.report.figures import percent, seconds
from lengthwise.report.progress import LiveLine

if TYPE_CHECKING:
    from lengthwise.data.prepare import Progress

_BAR = 20  # characters


def progress_line(line: LiveLine) -> Callable[[Progress], None]:
    """Return what shows how far a preparation is, and how long it will still take."""
    start = time.monotonic()

    def show(now: Progress) -> None:
        share = now.files_done / max(1, now.num_files)
        bar = "#" * round(_BAR * share)
        text = f"[{bar:.<{_BAR}}] {percent(share)}, {now.files_done} of {now.num_files} files"
        if now.files_found:
            text += f", {now.files_found} of an earlier try"
        new = now.files_done - now.files_found
        if new:
            text += f", {seconds((time.monotonic() - start) * (now.num_files - now.files_done) / new)} left"
        line.update(text)

    return show
