"""Exchanges of sequences between the last rank to finish and one that is done early, so that the later end is earliest.

Only packs behind all rings are touched. An exchange compares all pairs of two ranks, some 40 us. Source: pairwise
interchange for makespan scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.planner.problem.lengths import NEARLY

PARTNERS = 4  # least busy ranks looked at for one with room, before the busiest is taken as it is
_COMPARED = 512  # sequences of a rank, evenly among all: memory of all pairs, and a closer fit gains nothing


@dataclass(slots=True)
class Bin:
    """Sequences of one pack (indices), the tokens that still fit, and `beside`, the ring whose microbatch it shares."""

    indices: list[int]
    room_tokens: int
    beside: int | None = None


@dataclass(slots=True)
class _Side:
    """One rank's sequences as arrays: bin and place of each."""

    indices: NDArray[np.int64]
    bins: NDArray[np.int64]
    rooms: NDArray[np.int64]


def level_by_swaps(
    loads: Sequence[float],
    bins: Sequence[list[Bin]],
    lengths: NDArray[np.int64],
    seconds: NDArray[np.float64],
    *,
    goal_seconds: float,
    most_swaps: int,
) -> float:
    """Exchange sequences until the last rank is done within `goal_seconds`, none helps, or `most_swaps` were made.

    Args:
        loads: when each rank is done.
        bins: of each rank, its packs; changed in place.
        lengths, seconds: of the sequences that the bins' indices mean.

    Returns:
        When the last rank is done.
    """
    ends = np.array(loads)
    for _ in range(most_swaps):
        busiest = int(ends.argmax())
        if ends[busiest] <= goal_seconds or not _relieve(busiest, ends, bins, lengths, seconds):
            break
    return float(ends.max())


def _relieve(
    busiest: int,
    ends: NDArray[np.float64],
    bins: Sequence[list[Bin]],
    lengths: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> bool:
    """Make one exchange that ends the busiest rank earlier; return whether there is one."""
    giving = _side(bins[busiest])
    if not len(giving.indices):
        return False
    count = min(PARTNERS, len(ends))
    for partner in np.argpartition(ends, count - 1)[:count].tolist():
        gap = ends[busiest] - ends[partner]
        taking = _side(bins[partner])
        gained = np.append(seconds[taking.indices], 0.0)  # the last column: nothing is given back
        longer = lengths[giving.indices][:, None] - np.append(lengths[taking.indices], 0)[None, :]
        rooms = np.append(taking.rooms, max((each.room_tokens for each in bins[partner]), default=0))
        moved = seconds[giving.indices][:, None] - gained[None, :]
        later = np.where(longer <= rooms[None, :], np.abs(moved - gap / 2), np.inf)
        place = int(later.argmin())
        if later.flat[place] >= gap / 2 - NEARLY * ends[busiest]:
            continue
        give, take = divmod(place, len(gained))
        _exchange(bins[busiest], giving, give, bins[partner], taking, take, lengths)
        ends[busiest] -= moved[give, take]
        ends[partner] += moved[give, take]
        return True
    return False


def _side(bins: Sequence[Bin]) -> _Side:
    counts = [len(each.indices) for each in bins]
    some = slice(None, None, 1 + sum(counts) // _COMPARED)
    return _Side(
        indices=np.array([index for each in bins for index in each.indices], dtype=np.int64)[some],
        bins=np.repeat(np.arange(len(bins)), counts)[some],
        rooms=np.repeat(np.array([each.room_tokens for each in bins], dtype=np.int64), counts)[some],
    )


def _exchange(
    givers: Sequence[Bin],
    giving: _Side,
    give: int,
    takers: Sequence[Bin],
    taking: _Side,
    take: int,
    lengths: NDArray[np.int64],
) -> None:
    """Move a sequence over, and `take`, one of the partner's, back."""
    given = int(giving.indices[give])
    giver = givers[int(giving.bins[give])]
    if take < len(taking.indices):
        taker, back = takers[int(taking.bins[take])], int(taking.indices[take])
    else:
        taker, back = max(takers, key=lambda each: each.room_tokens), None
    giver.indices.remove(given)
    taker.indices.append(given)
    giver.room_tokens += int(lengths[given])
    taker.room_tokens -= int(lengths[given])
    if back is not None:
        taker.indices.remove(back)
        giver.indices.append(back)
        giver.room_tokens -= int(lengths[back])
        taker.room_tokens += int(lengths[back])
