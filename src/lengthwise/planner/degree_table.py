"""The least degree within a limit where costs have no closed form: seconds on a grid of degrees, refined to the unit.

t(d) falls with d until transfers and hops outweigh the gain, apart from one step up where a ring first leaves its node.
The grid holds every degree up to 64 and steps of a 64th above, so between two of its neighbours t(d) is as good as
straight; where a limit falls between them, the least whole degree is found by halving. Only sequences that are too slow
at their least degree have a row, about 64 log2(N) entries on N ranks, made when a limit first asks for it; each further
limit costs one comparison an entry.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost import RingCost

_EVERY = 64  # degrees up to here are all in the grid, above it every 64th of the degree
_SLACK = 1 + 1e-12  # rounding, always taken in favour of the smaller degree

Whole = NDArray[np.int64]


class DegreeTable:
    """Seconds of sequences, launch included, over a grid of degrees in [least, most]."""

    def __init__(self, cost: RingCost, lengths: Whole, least: Whole, most: Whole) -> None:
        self._cost, self._lengths, self._least, self._most = cost, lengths, least, most
        self._at_least = self._seconds_at(lengths, least)
        self._made = np.inf  # the smallest limit for which rows were made
        self._make_rows(np.zeros(0, dtype=np.int64))

    def within(self, seconds: float) -> Whole:
        """Find the least degree of each sequence that ends within `seconds`; most + 1 where there is none."""
        limit = seconds * _SLACK
        slow = self._at_least > limit
        if limit < self._made:
            self._made = limit
            self._make_rows(np.flatnonzero(slow))
        degrees = self._least.copy()
        degrees[self._rows] = np.where(slow[self._rows], self._refined(limit), self._least[self._rows])
        return np.where(self._least <= self._most, degrees, self._most + 1)

    def _seconds_at(self, lengths: Whole, degrees: Whole) -> NDArray[np.float64]:
        return self._cost.ring_piece_seconds(lengths, degrees) + self._cost.fixed_seconds

    def _make_rows(self, rows: Whole) -> None:
        self._rows = rows
        least, most = self._least[rows], self._most[rows]
        grid = _grid(int(least.min(initial=1)), int(most.max(initial=1)))
        # Columns outside a row's own range stand for its least or most degree, so these two are always looked at.
        self._degrees = np.clip(np.broadcast_to(grid, (len(rows), len(grid))), least[:, None], most[:, None])
        flat = np.repeat(self._lengths[rows], len(grid))
        self._seconds = self._seconds_at(flat, self._degrees.ravel()).reshape(self._degrees.shape)

    def _refined(self, limit: float) -> Whole:
        """Find the first column within the limit, and halve the step to it; most + 1 where there is no such column."""
        rows, lengths = np.arange(len(self._rows)), self._lengths[self._rows]
        quick = self._seconds <= limit
        column = np.argmax(quick, axis=1)
        found = quick[rows, column]
        high = self._degrees[rows, column]
        low = np.where(column > 0, self._degrees[rows, column - 1], high)  # too slow
        while np.any(open_ := found & (high - low > 1)):
            middle = np.where(open_, (low + high) // 2, high)
            ends = self._seconds_at(lengths, middle) <= limit
            high, low = np.where(open_ & ends, middle, high), np.where(open_ & ~ends, middle, low)
        return np.where(found, high, self._most[self._rows] + 1)


def _grid(least: int, most: int) -> Whole:
    degrees = list(range(least, min(most, max(_EVERY, least)) + 1))
    while degrees and degrees[-1] < most:
        degrees.append(min(most, degrees[-1] + max(1, degrees[-1] // _EVERY)))
    return np.array(degrees or [least], dtype=np.int64)
