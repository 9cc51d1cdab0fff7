"""Local packs: short sequences into the gaps that rings leave, then onto the least loaded ranks, longest first.

1. The largest gap is filled first, with the longest that fits its time, in packs of at most `capacity` tokens.
2. What is left goes to the rank that is done first, into the first of its packs with room.
3. Where ends are then nearly level, sequences are exchanged between the last and the first to finish (`swaps`).

Costs n log N for n sequences on N ranks. Source: longest-processing-time list scheduling (Graham, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lengthwise.planner.placement.line import Gaps
from lengthwise.planner.placement.short_sequences import ShortSequences
from lengthwise.planner.placement.swaps import Bin, level_by_swaps

_OPEN_PACKS = 64  # packs of one rank in which room is looked for; older ones are taken as full
_NEARLY = 1.01  # times the goal; ends later than that are not worth mending
_SWAPS = 64  # exchanges between ranks, and two a rank
_UNLIMITED = 2**62  # room of a bin that is packed later
_RANKS_COMPARED = 4  # least loaded ranks among which one with room is looked for, to save a launch


class LocalPack(NamedTuple):
    """Sequences that `rank` computes alone, in one microbatch.

    `before`: it runs before the ring of this number (None: after all rings). `beside`: it shares the microbatch, and so
    the launch, of the ring of this number, and comes after the rank's shard of that.
    """

    rank: int
    sequences: list[int]
    before: int | None = None
    beside: int | None = None


class Rooms:
    """The tokens that rings leave on their ranks for packs beside them; each room can be taken once.

    `last` holds the last ring of each rank, -1 for none; `room_tokens` one entry a ring, empty where no room is given.
    """

    def __init__(self, last: Sequence[int], room_tokens: Sequence[int]) -> None:
        self.last = last
        self._room_tokens = room_tokens
        self._taken: set[tuple[int, int]] = set()

    @property
    def any(self) -> bool:
        """Whether any room is given."""
        return len(self._room_tokens) > 0

    def take(self, rank: int, ring: int) -> int:
        """Take the room beside a ring on a rank; 0 where there is none or it was taken."""
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
) -> tuple[list[LocalPack], float]:
    """Give what is left to the least loaded ranks, longest first; return the packs and when the last rank is done.

    Where that ends after `goal_seconds`, but not by much, sequences are exchanged between ranks (`swaps`).
    """
    left = short.left()
    loads = [(seconds, rank) for rank, seconds in enumerate(free)]
    heapq.heapify(loads)
    if launch_seconds == 0:
        bins = _owned(loads, left, short)
    else:
        bins = _packed(loads, left, short, capacity_tokens, launch_seconds, rooms)
    makespan = max(loads)[0]
    if goal_seconds < makespan <= goal_seconds * _NEARLY:
        ends = [load for load, _ in sorted(loads, key=lambda entry: entry[1])]
        columns = np.array(short.lengths), np.array(short.seconds)
        makespan = level_by_swaps(ends, bins, *columns, goal_seconds=goal_seconds, most_swaps=_SWAPS + 2 * len(free))
    if launch_seconds == 0:
        return _packs_of_owned(bins, short, capacity_tokens), makespan
    return local_packs(bins, short), makespan


def local_packs(bins: Sequence[Sequence[Bin]], short: ShortSequences) -> list[LocalPack]:
    """Write the bins of each rank, all that hold anything, as packs at its end or beside its last ring."""
    return [
        LocalPack(rank, short.numbers(each.indices), beside=each.beside)
        for rank, of_rank in enumerate(bins)
        for each in of_rank
        if each.indices
    ]


def _packed(
    loads: list[tuple[float, int]],
    left: Sequence[int],
    short: ShortSequences,
    capacity_tokens: int,
    launch_seconds: float,
    rooms: Rooms,
) -> list[list[Bin]]:
    """Deal to the least loaded ranks, each launch counted; return the packs of each rank."""
    ranks = [RankPacks(capacity_tokens, short.lengths[left[-1]] if left else 0) for _ in loads]
    for rank, after in enumerate(rooms.last):
        ranks[rank].open(rooms.take(rank, after), beside=after)
    for index in left:
        length, seconds = short.lengths[index], short.seconds[index]
        load, rank = loads[0]
        if length <= ranks[rank].widest_tokens:
            heapq.heapreplace(loads, (load + seconds, rank))
        else:
            launch, load, rank = _least_with_launch(loads, ranks, length, launch_seconds)
            heapq.heappush(loads, (load + launch + seconds, rank))
        ranks[rank].put(length, index)
    return [each.packs for each in ranks]


def _owned(loads: list[tuple[float, int]], left: Sequence[int], short: ShortSequences) -> list[list[Bin]]:
    """Deal where packs cost nothing: each rank has one bin without limits, and packs it afterwards."""
    owned: list[list[int]] = [[] for _ in loads]
    for index in left:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + short.seconds[index], rank))
        owned[rank].append(index)
    return [[Bin(indices, _UNLIMITED)] for indices in owned]


def _packs_of_owned(bins: Sequence[list[Bin]], short: ShortSequences, capacity_tokens: int) -> list[LocalPack]:
    """Let each rank put its own sequences into the first of its packs with room, longest first."""
    packs: list[LocalPack] = []
    lengths, sequences = short.lengths, short.sequences
    for rank, (owned,) in enumerate(bins):
        descending = sorted(owned.indices, reverse=True)
        shortest = lengths[descending[-1]] if descending else 0
        rooms: list[int] = []  # of packs with room for the shortest, and beside it what they hold
        open_: list[list[int]] = []
        for index in descending:
            length, place = lengths[index], 0
            for room in rooms:
                if room >= length:
                    break
                place += 1
            else:
                rooms.append(capacity_tokens)
                open_.append([])
                packs.append(LocalPack(rank, open_[-1]))
            rooms[place] -= length
            open_[place].append(sequences[index])
            if rooms[place] < shortest:
                del rooms[place], open_[place]
    return packs


class RankPacks:
    """The packs of one rank; those with no room for the shortest sequence are not looked at again."""

    __slots__ = ("_capacity_tokens", "_open", "_rooms", "_shortest", "packs", "widest_tokens")

    def __init__(self, capacity_tokens: int, shortest: int) -> None:
        self.packs: list[Bin] = []
        self.widest_tokens = 0  # the most room of any open pack; a sequence up to here needs no launch
        self._open: list[Bin] = []  # packs with room, and beside it the room of each
        self._rooms: list[int] = []
        self._capacity_tokens, self._shortest = capacity_tokens, shortest

    def open(self, room_tokens: int, beside: int | None = None) -> None:
        """Open a pack; `beside`: of a ring's microbatch, in what the ring leaves of the rank's capacity."""
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
        pack = self._open[place]
        pack.indices.append(index)
        pack.room_tokens = rooms[place] = room = rooms[place] - length
        if room < self._shortest or len(rooms) > _OPEN_PACKS:
            full = place if room < self._shortest else 0
            del self._open[full], rooms[full]
        self.widest_tokens = max(rooms, default=0)


def _least_with_launch(
    loads: list[tuple[float, int]], ranks: Sequence[RankPacks], length: int, launch_seconds: float
) -> tuple[float, float, int]:
    """Take, of the least loaded ranks, the one that is least loaded with a launch where it needs one.

    The least loaded of all needs one, or it would not be asked. Returns the launch, the load and the rank, which is no
    longer in `loads`.
    """
    first = best = heapq.heappop(loads)
    launch = launch_seconds
    others: list[tuple[float, int]] = []
    for _ in range(min(_RANKS_COMPARED, len(ranks)) - 1):
        if loads[0][0] >= first[0] + launch_seconds:
            break  # a busier rank cannot end earlier
        entry = heapq.heappop(loads)
        if length <= ranks[entry[1]].widest_tokens:
            others.append(first)
            best, launch = entry, 0.0
            break
        others.append(entry)
    for entry in others:
        heapq.heappush(loads, entry)
    return launch, *best
