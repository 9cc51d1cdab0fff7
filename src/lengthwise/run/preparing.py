"""How far a preparation of data is, as a live line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lengthwise.core.names import counted
from lengthwise.report.figures import count, percent, seconds
from lengthwise.report.progress import LiveLine

if TYPE_CHECKING:
    from lengthwise.data.progress import Progress

_BAR = 20  # characters


def progress_line(line: LiveLine) -> Callable[[Progress], None]:
    """Return what shows how far a preparation is, and how long it will still take."""
    start = time.monotonic()
    before: list[Progress] = []

    def show(now: Progress) -> None:
        before.append(now) if not before else None
        found, spent = before[0], time.monotonic() - start
        share = now.bytes_done / max(1, now.num_bytes)
        bar = "#" * round(_BAR * share)
        shards = f"{now.shards_done} of {counted(now.num_shards, 'shard')}"
        text = f"[{bar:.<{_BAR}}] {percent(share)}, {shards}, {count(now.tokens)} tokens"
        if now is found and found.shards_found:
            text += f" of an earlier try ({counted(found.shards_found, 'shard')})"
        new_bytes = now.bytes_done - found.bytes_done
        if new_bytes and spent:
            left = spent * (now.num_bytes - now.bytes_done) / new_bytes
            rate = (now.tokens - found.tokens) / spent
            text += f", {count(rate)} tokens/s, {seconds(left)} left" if left else f", {count(rate)} tokens/s"
        line.update(text)

    return show
