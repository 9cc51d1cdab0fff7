"""The gain of one planner over another, and its uncertainty in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MODEL_ERROR = 0.05  # between planners under the same costs: docs/benchmarks.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of one planner over another. ratio: ratio of mean step seconds over the same batches.

    low, high: interval in which the simulation cannot tell them apart: the model's error, a share of the ratio, and two
    standard errors over the batches.
    """

    ratio: float
    low: float
    high: float
    batches: int

    @property
    def is_equal(self) -> bool:
        """Whether the two cannot be told apart."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"equal ({self.ratio:.2f}x)" if self.is_equal else f"{self.ratio:.2f}x"


def gain_over(
    other_seconds: Sequence[float], our_seconds: Sequence[float], *, model_error: float = MODEL_ERROR
) -> Gain:
    """Compare step seconds of the same batches, batch i in entry i of both. model_error: share of the ratio."""
    other, ours = np.array(other_seconds, dtype=np.float64), np.array(our_seconds, dtype=np.float64)
    assert len(other) == len(ours) > 0, f"{len(other)} and {len(ours)} batches"
    ratio = float(other.sum() / ours.sum())
    spread = 0.0
    if len(ours) > 1:
        spread = 2 * float(np.std(other - ratio * ours, ddof=1)) / float(ours.mean()) / len(ours) ** 0.5
    error = model_error * ratio + spread
    return Gain(ratio=ratio, low=ratio - error, high=ratio + error, batches=len(ours))
