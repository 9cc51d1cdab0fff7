"""Short sequences, each on one rank: what is left of them, and microbatches full of them.

1. Sequences stand in ascending order of length, and so of seconds.
2. Again and again the longest that is left within some tokens and seconds is taken, until none fits.

Taking one costs a binary search and, over entries that were taken, near constant time (union-find with path
compression). Source: first-fit decreasing bin packing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class ShortSequences:
    """Sequences in ascending order of length, from which the longest that still fits is taken again and again."""

    def __init__(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        seconds: Sequence[float],
        alive: list[int] | None = None,
    ) -> None:
        self.sequences, self.lengths, self.seconds = sequences, lengths, seconds
        # Entry i + 1 leads to the last one left at or before i.
        self._alive = list(range(len(sequences) + 1)) if alive is None else alive

    def _last_left(self, place: int) -> int:
        root = place
        while self._alive[root] != root:
            root = self._alive[root]
        while self._alive[place] != root:
            self._alive[place], place = root, self._alive[place]
        return root

    def take(self, tokens: int, seconds: float) -> int | None:
        """Take the longest sequence within both limits, as an index into the arrays; None if there is none."""
        place = self._last_left(min(bisect_right(self.lengths, tokens), bisect_right(self.seconds, seconds)))
        if place == 0:
            return None
        self._alive[place] = place - 1
        return place - 1

    def drop(self, index: int) -> None:
        """Take the sequence at an index of the arrays."""
        self._alive[index + 1] = index

    def copy(self) -> ShortSequences:
        """Return the same sequences, from which may be taken apart from these."""
        return ShortSequences(self.sequences, self.lengths, self.seconds, self._alive.copy())

    def left(self) -> list[int]:
        """List the indices of those not yet taken, longest first."""
        return [i for i in range(len(self.sequences) - 1, -1, -1) if self._alive[i + 1] == i + 1]


def full_packs(sequences: Sequence[int], lengths: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Fill one pack after the other, each with the longest that still fits, again and again.

    Args:
        sequences: their numbers, shortest first.
        lengths: their lengths in tokens, none above the capacity.
        capacity_tokens: what one pack holds.
    """
    short = ShortSequences(sequences, lengths, [0.0] * len(sequences))
    packs: list[list[int]] = []
    while (longest := short.take(capacity_tokens, 0.0)) is not None:
        room, pack = capacity_tokens - lengths[longest], [sequences[longest]]
        while (taken := short.take(room, 0.0)) is not None:
            room -= lengths[taken]
            pack.append(sequences[taken])
        packs.append(pack)
    return packs
