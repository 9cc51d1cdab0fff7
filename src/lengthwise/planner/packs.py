"""Short sequences: into the gaps that rings leave, then onto the least loaded ranks, largest first.

The smallest come last and level the ends. A pack holds at most `capacity` tokens; on each rank sequences go to the
first of its packs with room, so that launches are few and packs nearly full.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence

from lengthwise.planner.gangs import Gap

_OPEN_PACKS = 64  # packs of one rank in which room is looked for; older ones are taken as full
_RANKS_COMPARED = 4  # least loaded ranks among which one with room is looked for, to save a launch


class ShortSequences:
    """Sequences in ascending order of length, from which the longest that still fits is taken again and again."""

    def __init__(self, sequences: Sequence[int], lengths: Sequence[int], seconds: Sequence[float]) -> None:
        self.sequences, self.lengths, self.seconds = sequences, lengths, seconds
        self._alive = list(range(len(sequences) + 1))  # entry i + 1 leads to the last one left at or before i

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


def fill_gaps(
    gaps: Sequence[Gap], short: ShortSequences, *, capacity_tokens: int, launch_seconds: float
) -> list[tuple[Gap, list[int]]]:
    """Fill gaps with local packs, largest gap first; return (gap, sequences of one pack) in that order."""
    packs: list[tuple[Gap, list[int]]] = []
    for gap in sorted(gaps, key=lambda gap: (-gap.seconds, gap.before, gap.rank)):
        time_left = gap.seconds
        while time_left > launch_seconds:
            time_left -= launch_seconds
            room, pack = capacity_tokens, []
            while (taken := short.take(room, time_left)) is not None:
                room -= short.lengths[taken]
                time_left -= short.seconds[taken]
                pack.append(short.sequences[taken])
            if not pack:
                break
            packs.append((gap, pack))
    return packs


def level_ends(
    free: Sequence[float], short: ShortSequences, *, capacity_tokens: int, launch_seconds: float
) -> list[tuple[int, list[int]]]:
    """Give what is left to the least loaded ranks, longest first; return (rank, sequences of one pack)."""
    loads = [(seconds, rank) for rank, seconds in enumerate(free)]
    heapq.heapify(loads)
    rooms: dict[int, list[int]] = {rank: [] for rank in range(len(free))}
    packs: dict[int, list[list[int]]] = {rank: [] for rank in range(len(free))}
    compared = min(_RANKS_COMPARED if launch_seconds > 0 else 1, len(free))
    for index in short.left():
        length = short.lengths[index]
        choices: list[tuple[float, float, int, int]] = []
        for _ in range(compared):
            load, rank = heapq.heappop(loads)
            pack = _first_fit(rooms[rank], length)
            launch = launch_seconds if pack == len(rooms[rank]) else 0.0
            choices.append((load + launch, load, rank, pack))
            if launch == 0.0:
                break  # a busier rank cannot end earlier
        best = min(choices)
        for choice in choices:
            if choice is not best:
                heapq.heappush(loads, (choice[1], choice[2]))
        load, _, rank, pack = best
        if pack == len(rooms[rank]):
            rooms[rank].append(capacity_tokens)
            packs[rank].append([])
        rooms[rank][pack] -= length
        packs[rank][pack].append(short.sequences[index])
        heapq.heappush(loads, (load + short.seconds[index], rank))
    return [(rank, pack) for rank in range(len(free)) for pack in packs[rank]]


def _first_fit(rooms: Sequence[int], length: int) -> int:
    """Return the first pack with room for `length` tokens, or the number of packs if there is none."""
    for pack in range(max(0, len(rooms) - _OPEN_PACKS), len(rooms)):
        if rooms[pack] >= length:
            return pack
    return len(rooms)
