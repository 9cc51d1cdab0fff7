"""Short sequences, each on one rank: take the longest that fits some tokens and seconds, until none fits.

A take is a binary search, and near constant time over taken ones (union-find). Source: first-fit decreasing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np


class ShortSequences:
    """Sequences in ascending order of length, from which the longest that fits can be taken."""

    def __init__(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        seconds: Sequence[float],
        alive: list[int] | None = None,
        most_seconds: list[float] | None = None,
    ) -> None:
        self.sequences, self.lengths, self.seconds = sequences, lengths, seconds
        # Of all up to each: a tree of sequences (`cost.trees`) may take less time than a shorter sequence.
        self._most_seconds = list(accumulate(seconds, max)) if most_seconds is None else most_seconds
        # Entry i + 1 leads to the last one left at or before i.
        self._alive = list(range(len(sequences) + 1)) if alive is None else alive

    def fill(self, tokens: int, seconds: float) -> tuple[list[int], int, float]:
        """Take the longest within both limits, repeatedly; return the indices, and the rest of the limits."""
        lengths, times, most, alive = self.lengths, self.seconds, self._most_seconds, self._alive
        taken: list[int] = []
        place = len(lengths)
        while place:
            if lengths[place - 1] > tokens:
                place = bisect_right(lengths, tokens, 0, place - 1)
            if place and most[place - 1] > seconds:
                place = bisect_right(most, seconds, 0, place - 1)
            while alive[place] != place:
                alive[place] = place = alive[alive[place]]
            if place:
                alive[place] = place = place - 1
                tokens -= lengths[place]
                seconds -= times[place]
                taken.append(place)
        return taken, tokens, seconds

    def numbers(self, indices: Sequence[int]) -> list[int]:
        """Return the sequences at these indices."""
        return [self.sequences[index] for index in indices]

    def drop(self, index: int) -> None:
        """Take the sequence at an index."""
        self._alive[index + 1] = index

    def copy(self) -> ShortSequences:
        """Return a copy, from which sequences are taken independently."""
        return ShortSequences(self.sequences, self.lengths, self.seconds, self._alive.copy(), self._most_seconds)

    def left(self) -> list[int]:
        """List the indices of those not yet taken, longest first."""
        places = np.array(self._alive[1:], dtype=np.int64)
        return np.flatnonzero(places == np.arange(1, len(places) + 1))[::-1].tolist()


def full_packs(sequences: Sequence[int], lengths: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Fill packs of `capacity_tokens`, each with the longest that still fits; `sequences` come shortest first."""
    short = ShortSequences(sequences, lengths, [0.0] * len(sequences))
    packs: list[list[int]] = []
    while taken := short.fill(capacity_tokens, 0.0)[0]:
        packs.append(short.numbers(taken))
    return packs
