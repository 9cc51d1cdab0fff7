"""Rings on the line of ranks: gang list scheduling.

Longest degree first, then longest work: each ring takes the interval that lets it start earliest; among those, the one
that makes the least idle time, then the lowest. A ring starts when the last of its ranks is free, so the others wait:
these gaps are remembered, and local packs fill them. One ring costs a few array operations over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One sequence over the ranks [first, first + degree)."""

    sequence: int
    first: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time in which `rank` waits for the start of ring number `before`."""

    rank: int
    before: int
    seconds: float


def place_rings(
    rings: Sequence[tuple[int, int, float]], ranks: int
) -> tuple[list[Ring], list[Gap], NDArray[np.float64]]:
    """Place rings given as (sequence, degree, seconds with launch), in this order.

    Returns the placed rings, the gaps they leave, and when each rank is free.
    """
    free = np.zeros(ranks)
    placed: list[Ring] = []
    gaps: list[Gap] = []
    for sequence, degree, seconds in rings:
        first, start = earliest_interval(free, degree)
        taken = slice(first, first + degree)
        for offset in np.flatnonzero(free[taken] < start).tolist():
            rank = first + offset
            gaps.append(Gap(rank=rank, before=len(placed), seconds=start - float(free[rank])))
        placed.append(Ring(sequence=sequence, first=first, degree=degree))
        free[taken] = start + seconds
    return placed, gaps, free


def earliest_interval(free: NDArray[np.float64], degree: int) -> tuple[int, float]:
    """Find where a ring starts earliest; of equal ones, where the least time is lost waiting, then the lowest."""
    starts = _window_max(free, degree)
    start = float(starts.min())
    total = np.concatenate(([0.0], np.cumsum(free)))
    idle = np.where(starts == start, degree * start - (total[degree:] - total[:-degree]), np.inf)
    return int(np.argmin(idle)), start


def _window_max(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return the largest of every `width` neighbours, by doubling."""
    span, largest = 1, values
    while 2 * span <= width:
        largest = np.maximum(largest[:-span], largest[span:])
        span *= 2
    rest = width - span
    return np.maximum(largest[:-rest], largest[rest:]) if rest else largest
