"""A finished step as a line of at most 80 columns; a narrower terminal has it wrapped. All else is in metrics.jsonl."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from lengthwise.report.figures import clock, count, seconds

if TYPE_CHECKING:
    from lengthwise.run.metrics import FinishedStep

_WIDTH = 80
_TIMED_STEPS = 50  # the last ones, whose mean is that of the steps that are left


class StepLines:
    """Makes the lines of a run's steps, in their order."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._before: float | None = None

    def of(self, step: FinishedStep, width: int | None) -> str:
        """Return the lines of a step on a terminal of `width` columns; None: no terminal."""
        done = step.metrics
        now = time.monotonic()
        self._seconds.append(done.step_seconds if self._before is None else now - self._before)
        self._before = now
        left = (step.num_steps - done.step) * sum(self._seconds) / len(self._seconds)
        parts = [
            f"step {done.step:>{len(str(step.num_steps))}}/{step.num_steps}",
            f"loss {done.loss:.4f}",
            f"lr {done.lr:.2e}",
            f"grad {done.grad_norm:.3g}",
            f"{count(done.tokens_per_second)} tok/s",
            seconds(done.step_seconds),
            f"eta {clock(left)}",
        ]
        lines, most = [parts[0]], _WIDTH if width is None else width
        between = "  " if len("  ".join(parts)) <= most else " "
        for part in parts[1:]:
            if width is None or len(lines[-1]) + len(between) + len(part) <= most:
                lines[-1] += between + part
            else:
                lines.append(f"  {part}")
        return "\n".join(lines)
