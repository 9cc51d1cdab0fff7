"""A finished step on the screen: a row of a table on a terminal, wrapped where that is too narrow, one line elsewhere.

Every step keeps its own lines: nothing is cut, and no line takes another's place.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from lengthwise.report.figures import clock, count, percent, seconds

if TYPE_CHECKING:
    from lengthwise.run.metrics import FinishedStep, StepMetrics

_HEADS = ("loss", "lr", "grad norm", "tokens/s", "memory", "imbalance", "time left")
_WIDTHS = (8, 8, 9, 8, 6, 9, 9)  # in characters; with up to 9,999,999 steps a row has 79
_ROWS = 20  # after which the heads come again
_TIMED_STEPS = 50  # the last ones, whose mean is that of the steps that are left


class StepLines:
    """Makes the lines of a run's steps, in their order."""

    def __init__(self) -> None:
        self._rows = 0
        self._seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._before: float | None = None

    def of(self, step: FinishedStep, width: int | None) -> str:
        """Return the lines of a step on a terminal of `width` columns; None: the one line for anything else."""
        done, last = step.metrics, step.num_steps
        left = clock(self._seconds_left(done, last))
        if width is None:
            return "  ".join(_labelled(done, last, left, also=True))
        row = _row(done, last, left)
        if len(row) > width:
            return wrapped(_labelled(done, last, left, also=False), width)
        self._rows += 1
        return row if self._rows % _ROWS != 1 else f"{_heads(last)}\n{row}"

    def _seconds_left(self, done: StepMetrics, num_steps: int) -> float:
        """Return what the steps that are left take, by the last ones with all that came between them."""
        now = time.monotonic()
        self._seconds.append(done.step_seconds if self._before is None else now - self._before)
        self._before = now
        return (num_steps - done.step) * sum(self._seconds) / len(self._seconds)


def wrapped(parts: list[str], width: int) -> str:
    """Join parts with two spaces, in lines of at most `width` characters, the later ones indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def _place(step: int, num_steps: int) -> str:
    return f"{step:>{len(str(num_steps))}}/{num_steps}"


def _heads(num_steps: int) -> str:
    place = "step".rjust(len(_place(0, num_steps)))
    return " ".join([place, *(f"{head:>{width}}" for head, width in zip(_HEADS, _WIDTHS, strict=True))])


def _row(done: StepMetrics, num_steps: int, left: str) -> str:
    cells = (
        f"{done.loss:.4f}",
        f"{done.lr:.2e}",
        f"{done.grad_norm:.3g}",
        count(done.tokens_per_second),
        f"{count(done.peak_memory_bytes)}B",
        f"{done.imbalance_ratio:.2f}",
        left,
    )
    row = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return " ".join([f"{_place(done.step, num_steps):>4}", *row])


def _labelled(done: StepMetrics, num_steps: int, left: str, *, also: bool) -> list[str]:
    """Return the parts of a line that names what it says; `also`: what a table has no room for."""
    others = (
        f"idle {percent(done.idle_ratio)}",
        f"in rings {percent(done.ring_token_ratio)}",
        seconds(done.step_seconds),
    )
    return [
        f"step {_place(done.step, num_steps)}",
        f"loss {done.loss:.4f}",
        f"lr {done.lr:.2e}",
        f"grad norm {done.grad_norm:.3g}",
        f"{count(done.tokens_per_second)} tokens/s",
        f"memory {count(done.peak_memory_bytes)}B",
        f"imbalance {done.imbalance_ratio:.2f}",
        *(others if also else ()),
        f"time left {left}",
    ]
