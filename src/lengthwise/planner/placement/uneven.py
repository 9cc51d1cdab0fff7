"""Short sequences onto ranks of unequal speed, longest first: each to the rank on which it ends first.

What `packs.level_ends` does where all ranks are alike, there by load alone: a slow rank that is free first may be done
last. Ranks of about one speed stand in one heap by load, so a sequence asks the first of each heap only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lengthwise.planner.placement.level_ends import LocalPack, RankPacks, Rooms, local_packs
from lengthwise.planner.placement.short_sequences import ShortSequences

_HEAPS = 16  # of ranks of about one speed


def level_uneven_ends(
    free: Sequence[float],
    speeds: Sequence[float],
    short: ShortSequences,
    *,
    capacity_tokens: int,
    launch_seconds: float,
    rooms: Rooms,
) -> tuple[list[LocalPack], float]:
    """Deal what is left; return the packs and when the last rank is done.

    Args:
        free: when each rank is done with its rings.
        speeds: of each rank; seconds and launches are those of a rank of speed 1.
        short: the sequences.
        capacity_tokens: what one pack holds.
        launch_seconds: of each pack that has no place beside a ring.
        rooms: such places.
    """
    left = short.left()
    ranks = [RankPacks(capacity_tokens, short.lengths[left[-1]] if left else 0) for _ in free]
    for rank, after in enumerate(rooms.last):
        ranks[rank].open(rooms.take(rank, after), beside=after)
    heaps = _heaps(free, speeds)
    for index in left:
        length, seconds = short.lengths[index], short.seconds[index]
        ends = [
            (load + (seconds + (launch_seconds if length > ranks[rank].widest_tokens else 0.0)) / speeds[rank], rank)
            for load, rank in (heap[0] for heap in heaps)
        ]
        soonest = min(ends)
        heapq.heapreplace(heaps[ends.index(soonest)], soonest)
        ranks[soonest[1]].put(length, index)
    return local_packs([each.packs for each in ranks], short), max(load for heap in heaps for load, _ in heap)


def _heaps(free: Sequence[float], speeds: Sequence[float]) -> list[list[tuple[float, int]]]:
    distinct, numbers = np.unique(speeds, return_inverse=True)
    heaps: list[list[tuple[float, int]]] = [[] for _ in range(min(len(distinct), _HEAPS))]
    for rank, number in enumerate(numbers.tolist()):
        heaps[number * len(heaps) // len(distinct)].append((free[rank], rank))
    for heap in heaps:
        heapq.heapify(heap)
    return heaps
