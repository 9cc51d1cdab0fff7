"""How far a preparation of data is, as a live line, and how many processes it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lengthwise.report.figures import percent, seconds
from lengthwise.report.progress import LiveLine

if TYPE_CHECKING:
    from lengthwise.data.prepare import Progress

_BAR = 20  # characters


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def progress_line(line: LiveLine) -> Callable[[Progress], None]:
    """Return what shows how far a preparation is, and how long it will still take."""
    start = time.monotonic()

    def show(now: Progress) -> None:
        share = now.parts_done / max(1, now.num_parts)
        bar = "#" * round(_BAR * share)
        text = f"[{bar:.<{_BAR}}] {percent(share)}, {now.parts_done} of {now.num_parts} parts"
        if now.parts_found:
            text += f", {now.parts_found} of an earlier try"
        new = now.parts_done - now.parts_found
        if new:
            text += f", {seconds((time.monotonic() - start) * (now.num_parts - now.parts_done) / new)} left"
        line.update(text)

    return show
