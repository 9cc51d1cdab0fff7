"""The learning rate of a step: a pure function, so that it can be checked without training."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, num_steps: int) -> float:
    """Return the learning rate of `step`, counted from 1.

    Warm-up multiplies by min(1, step / warmup_steps). After it, linear and cosine fall from the peak towards 0, which
    they would reach one step after the last: no step of a run has learning rate 0.
    """
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    if schedule == "constant":
        return peak * warmup
    progress = max(0, step - 1 - warmup_steps) / max(1, num_steps - warmup_steps)
    remaining = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * warmup * remaining
