"""Local packs: put short sequences into the gaps that rings leave, then on the least loaded ranks, longest first.

n log N for n sequences on N ranks (Graham, 1969). Then the last rank to finish and one that finishes early exchange
sequences of packs behind all rings, to make the later end earliest: pairwise interchange, which compares all pairs of
two ranks, some 40 us per exchange.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.planner.placement.line import Gaps
from lengthwise.planner.placement.short_sequences import ShortSequences
from lengthwise.planner.problem.effort import OPEN, TOLD_APART
from lengthwise.planner.problem.step_lengths import NEARLY

_PARTNERS = 4  # least busy ranks examined for one with room
_COMPARED = 512  # sequences examined of a rank, evenly spaced: it limits memory, and a closer fit gains nothing
Load = tuple[float, int]  # (when a rank is done, rank)


class LocalPack(NamedTuple):
    """Sequences that `rank` computes alone, in one microbatch.

    before: number of the ring that it runs before, None for after all rings.
    beside: ring whose microbatch it joins, after the ring and without overhead of its own, or None.
    """

    rank: int
    sequences: list[int]
    before: int | None = None
    beside: int | None = None


class _Alike(NamedTuple):
    """Ranks of about one speed: the least loaded, ascending, and a heap of the others."""

    first: list[Load]
    others: list[Load]


@dataclass(slots=True)
class Bin:
    """Sequences of one pack (indices), the tokens that still fit, and the ring whose microbatch it shares, if any."""

    indices: list[int]
    room_tokens: int
    beside: int | None = None


class Rooms:
    """The tokens that rings leave on their ranks for packs beside them; each room can be taken once.

    last: last ring of each rank, -1 if none. room_tokens: tokens of room beside each ring; empty without room.
    """

    def __init__(self, last: Sequence[int], room_tokens: Sequence[int]) -> None:
        self.last = last
        self._room_tokens = room_tokens
        self._taken: set[tuple[int, int]] = set()

    @property
    def any(self) -> bool:
        """Whether there is any room."""
        return len(self._room_tokens) > 0

    def take(self, rank: int, ring: int) -> int:
        """Take the room beside a ring on a rank; return 0 if there is none, or it was taken."""
        if ring < 0 or not self._room_tokens or (rank, ring) in self._taken:
            return 0
        self._taken.add((rank, ring))
        return self._room_tokens[ring]


NO_ROOMS = Rooms([], [])


def fill_gaps(
    gaps: Gaps, short: ShortSequences, *, capacity_tokens: int, launch_seconds: float, rooms: Rooms = NO_ROOMS
) -> list[LocalPack]:
    """Fill gaps with local packs, largest gap first."""
    packs: list[LocalPack] = []
    least = launch_seconds + min(short.seconds, default=0.0)
    for rank, after, before, gap_seconds in gaps.longest_first(0.0 if rooms.any else least):
        beside, _, time_left = short.fill(rooms.take(rank, after), gap_seconds)
        if beside:
            packs.append(LocalPack(rank, short.numbers(beside), beside=after))
        while time_left >= least:
            pack, _, time_left = short.fill(capacity_tokens, time_left - launch_seconds)
            if not pack:
                break
            packs.append(LocalPack(rank, short.numbers(pack), before=before))
    return packs


def level_ends(
    free: Sequence[float],
    short: ShortSequences,
    *,
    capacity_tokens: int,
    launch_seconds: float,
    rooms: Rooms = NO_ROOMS,
    goal_seconds: float = float("inf"),
    speeds: Sequence[float] | None = None,
) -> tuple[list[LocalPack], float]:
    """Give the rest, longest first, to the rank that ends it first; return the packs and the makespan.

    Args:
        free: seconds at which each rank is done with its rings.
        short: seconds of the sequences on a rank of speed 1.
        capacity_tokens: tokens per pack.
        launch_seconds: overhead of each pack that is not beside a ring, on a rank of speed 1.
        rooms: the rooms beside rings.
        goal_seconds: makespan that is early enough; later ones of equal speeds go through `level_by_swaps`.
        speeds: relative speed of each rank (default: all 1).
    """
    left = short.left()
    ranks = [RankPacks(capacity_tokens, short.lengths[left[-1]] if left else 0) for _ in free]
    for rank, after in enumerate(rooms.last):
        ranks[rank].open(rooms.take(rank, after), beside=after)
    paces = [1.0] * len(free) if speeds is None else speeds
    groups = _by_speed(free, paces, _PARTNERS if launch_seconds else 1)
    lengths, times = short.lengths, short.seconds
    for index in left:
        rank = _give(groups, ranks, lengths[index], times[index], launch_seconds, paces)
        ranks[rank].put(lengths[index], index)
    loads = [entry for group in groups for entries in group for entry in entries]
    bins, makespan = [each.packs for each in ranks], max(loads)[0]
    if speeds is None and makespan > goal_seconds:
        if launch_seconds == 0:
            for each in ranks:
                each.open(capacity_tokens)  # one more costs nothing
        ends_of = [load for load, _ in sorted(loads, key=lambda entry: entry[1])]
        columns = np.array(lengths), np.array(times)
        makespan = level_by_swaps(ends_of, bins, *columns, goal_seconds=goal_seconds, most_swaps=len(free))
    return local_packs(bins, short), makespan


def _give(
    groups: Sequence[_Alike],
    ranks: Sequence[RankPacks],
    length: int,
    seconds: float,
    launch_seconds: float,
    speeds: Sequence[float],
) -> int:
    """Add a sequence to the rank that ends it first; return the rank."""
    end, chosen, before = float("inf"), groups[0], groups[0].first[0]
    for group in groups:
        entry = group.first[0]
        launch = 0.0 if length <= ranks[entry[1]].widest_tokens else launch_seconds
        if launch:
            with_launch = entry[0] + launch / speeds[entry[1]]
            for other in group.first[1:]:
                if other[0] < with_launch and length <= ranks[other[1]].widest_tokens:
                    entry, launch = other, 0.0
                    break
        if (ends := entry[0] + (launch + seconds) / speeds[entry[1]]) < end:
            end, chosen, before = ends, group, entry
    chosen.first[chosen.first.index(before)] = heapq.heappushpop(chosen.others, (end, before[1]))
    chosen.first.sort()
    return before[1]


def _by_speed(free: Sequence[float], speeds: Sequence[float], looked_at: int) -> list[_Alike]:
    """Group ranks of about one speed by when they are free: only the first of each group are looked at."""
    distinct, numbers = np.unique(speeds, return_inverse=True)
    groups: list[list[Load]] = [[] for _ in range(min(len(distinct), TOLD_APART))]
    for rank, number in enumerate(numbers.tolist()):
        groups[number * len(groups) // len(distinct)].append((free[rank], rank))
    return [_Alike(loads[:looked_at], loads[looked_at:]) for loads in map(sorted, groups)]


def local_packs(bins: Sequence[Sequence[Bin]], short: ShortSequences) -> list[LocalPack]:
    """Return the non-empty bins of each rank as packs at its end or beside its last ring."""
    return [
        LocalPack(rank, short.numbers(each.indices), beside=each.beside)
        for rank, of_rank in enumerate(bins)
        for each in of_rank
        if each.indices
    ]


class RankPacks:
    """The packs of one rank; those without room for the shortest sequence are closed."""

    __slots__ = ("_capacity_tokens", "_open", "_rooms", "_shortest", "packs", "widest_tokens")

    def __init__(self, capacity_tokens: int, shortest: int) -> None:
        self.packs: list[Bin] = []
        self.widest_tokens = 0  # the most room of any open pack; a sequence up to here needs no launch
        self._open: list[Bin] = []  # packs with room; `_rooms` has the room of each
        self._rooms: list[int] = []
        self._capacity_tokens, self._shortest = capacity_tokens, shortest

    def open(self, room_tokens: int, beside: int | None = None) -> None:
        """Open a pack. beside: ring whose microbatch it joins, within the capacity that the ring leaves."""
        if room_tokens >= self._shortest:
            self.packs.append(Bin([], room_tokens, beside=beside))
            self._open.append(self.packs[-1])
            self._rooms.append(room_tokens)
            self.widest_tokens = max(self.widest_tokens, room_tokens)

    def put(self, length: int, index: int) -> None:
        """Put a sequence into the first open pack with room, or into a new one."""
        if length > self.widest_tokens:
            self.open(self._capacity_tokens)
        rooms = self._rooms
        place = 0
        while rooms[place] < length:
            place += 1
        pack, before = self._open[place], rooms[place]
        pack.indices.append(index)
        pack.room_tokens = rooms[place] = room = before - length
        if room < self._shortest or len(rooms) > OPEN:
            full = place if room < self._shortest else 0
            before = max(before, rooms[full])
            del self._open[full], rooms[full]
        if before == self.widest_tokens:
            self.widest_tokens = max(rooms, default=0)


def level_by_swaps(
    loads: Sequence[float],
    bins: Sequence[list[Bin]],
    lengths: NDArray[np.int64],
    seconds: NDArray[np.float64],
    *,
    goal_seconds: float,
    most_swaps: int,
) -> float:
    """Exchange sequences until the makespan is within `goal_seconds`, none helps, or `most_swaps` were made.

    Args:
        loads: seconds at which each rank is done.
        bins: packs of each rank, changed in place.
        lengths, seconds: tokens and seconds of the sequences, by the bins' indices.

    Returns:
        The makespan.
    """
    ends, lengths, seconds = np.array(loads), np.append(lengths, 0), np.append(seconds, 0.0)
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
    """Make one exchange that ends the busiest rank earlier; return whether there is one. The last index is nothing."""
    giving = _entries(bins[busiest])
    given, given_rooms = _columns(giving)
    count = min(_PARTNERS, len(ends))
    for partner in np.argpartition(ends, count - 1)[:count].tolist() if giving else ():
        if not bins[partner]:
            continue
        taking = [*_entries(bins[partner]), (-1, max(bins[partner], key=lambda each: each.room_tokens))]
        taken, taken_rooms = _columns(taking)
        longer = lengths[given][:, None] - lengths[taken]
        moved = seconds[given][:, None] - seconds[taken]
        fits = (longer <= taken_rooms) & (-longer <= given_rooms[:, None])  # a tree may be longer and yet faster
        half = (ends[busiest] - ends[partner]) / 2
        later = np.where(fits, np.abs(moved - half), np.inf)
        place = divmod(int(later.argmin()), len(taking))
        if later[place] >= half - NEARLY * ends[busiest]:
            continue
        (index, giver), (back, taker) = giving[place[0]], taking[place[1]]
        giver.indices.remove(index)
        taker.indices.append(index)
        if back >= 0:
            taker.indices.remove(back)
            giver.indices.append(back)
        giver.room_tokens += int(longer[place])
        taker.room_tokens -= int(longer[place])
        ends[busiest] -= moved[place]
        ends[partner] += moved[place]
        return True
    return False


def _entries(bins: Sequence[Bin]) -> list[tuple[int, Bin]]:
    """Return sequences of a rank with their bins, evenly spaced if they are many."""
    every = [(index, each) for each in bins for index in each.indices]
    return every[:: 1 + len(every) // _COMPARED]


def _columns(entries: Sequence[tuple[int, Bin]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices, and the rooms of their bins."""
    rows = np.array([(index, each.room_tokens) for index, each in entries], dtype=np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]
