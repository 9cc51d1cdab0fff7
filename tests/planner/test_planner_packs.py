"""Local packs: into gaps, onto the least loaded ranks, and exchanges between these."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.planner.placement.level_ends import (
    NO_ROOMS,
    Bin,
    LocalPack,
    Rooms,
    fill_gaps,
    level_by_swaps,
    level_ends,
)
from lengthwise.planner.placement.line import Gaps
from lengthwise.planner.placement.short_sequences import ShortSequences


def _short(lengths: list[int]) -> ShortSequences:
    ordered = sorted(lengths)
    return ShortSequences(list(range(len(ordered))), ordered, [float(length) for length in ordered])


def _gaps(*rows: tuple[int, int, int, float]) -> Gaps:
    ranks, after, before, seconds = ([row[column] for row in rows] for column in range(4))
    whole = [np.array(column, dtype=np.int64) for column in (ranks, after, before)]
    return Gaps(ranks=whole[0], after=whole[1], before=whole[2], seconds=np.array(seconds, dtype=np.float64))


def test_fill_gaps_needs_no_launch_beside_the_ring_before_the_gap() -> None:
    rooms = Rooms([4], [7])
    packs = fill_gaps(_gaps((0, 0, 1, 8.0)), _short([9, 5, 2]), capacity_tokens=9, launch_seconds=1.0, rooms=rooms)
    assert [(pack.sequences, pack.before, pack.beside) for pack in packs] == [([1, 0], None, 0)]


def test_level_ends_puts_sequences_beside_the_last_ring_of_a_rank() -> None:
    """Rank 1 ends its ring later, but takes 4 without the launch that rank 0 would need."""
    rooms = Rooms([-1, 3], [0, 0, 0, 4])
    packs, end = level_ends([0.0, 5.0], _short([4]), capacity_tokens=6, launch_seconds=7.0, rooms=rooms)
    assert [(pack.rank, pack.sequences, pack.beside) for pack in packs] == [(1, [0], 3)]
    assert end == 9.0


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    gaps=st.lists(st.tuples(st.integers(-1, 5), st.floats(0.1, 80)), max_size=6),
    ranks=st.integers(1, 5),
    launch=st.sampled_from([0.0, 0.5, 30.0]),
    room=st.integers(0, 50),
    goal=st.sampled_from([float("inf"), 0.995]),
)
def test_packs_hold_every_sequence_once_within_capacity(lengths, gaps, ranks, launch, room, goal):
    holes = [(0, after, number, seconds) for number, (after, seconds) in enumerate(gaps)]
    limits = {"capacity_tokens": 50, "launch_seconds": launch}

    def dealt(goal_seconds: float) -> tuple[ShortSequences, list[LocalPack], list[LocalPack], float]:
        short, rooms = _short(lengths), Rooms([5] * ranks, [room] * 6) if launch else NO_ROOMS
        filled = fill_gaps(_gaps(*holes), short, **limits, rooms=rooms)
        free = [3.0 * rank for rank in range(ranks)]
        return short, filled, *level_ends(free, short, **limits, rooms=rooms, goal_seconds=goal_seconds)

    as_dealt = dealt(float("inf"))[-1]
    short, filled, ends, end = dealt(goal * as_dealt)
    assert end <= as_dealt
    for number, (_, seconds) in enumerate(gaps):
        inside = [launch + sum(short.seconds[i] for i in pack.sequences) for pack in filled if pack.before == number]
        assert sum(inside) <= seconds * (1 + 1e-12)
    begin = [3.0 * rank for rank in range(ranks)]
    for pack in ends:
        begin[pack.rank] += sum(short.seconds[i] for i in pack.sequences) + (launch if pack.beside is None else 0.0)
    assert max(begin) <= end * (1 + 1e-12)  # an exchange may empty a pack, whose launch is then saved
    assert end < as_dealt or max(begin) == pytest.approx(end)
    packs = filled + ends
    assert sorted(i for pack in packs for i in pack.sequences) == list(range(len(lengths)))
    assert all(0 < sum(short.lengths[i] for i in pack.sequences) <= 50 for pack in packs)
    beside = [(pack.rank, pack.beside) for pack in packs if pack.beside is not None]
    assert len(set(beside)) == len(beside)
    assert all(sum(short.lengths[i] for i in pack.sequences) <= room for pack in packs if pack.beside is not None)


def test_level_ends_prefers_room_to_a_launch() -> None:
    packs, end = level_ends([0.0, 20.0], _short([6, 3]), capacity_tokens=9, launch_seconds=100.0)
    assert [(pack.rank, pack.sequences) for pack in packs] == [(0, [1, 0])]
    assert end == 109.0


def test_a_pair_levels_exactly_by_an_exchange() -> None:
    lengths, seconds = np.array([1, 2, 3, 4]), np.array([1.0, 2.0, 3.0, 4.0])
    bins = [[Bin([3, 2], 0)], [Bin([1, 0], 0)]]
    end = level_by_swaps([7.0, 3.0], bins, lengths, seconds, goal_seconds=5.0, most_swaps=9)
    assert end == 7.0, "no room: nothing may be exchanged for less"
    assert level_by_swaps([7.0, 3.0], bins, lengths, seconds, goal_seconds=7.0, most_swaps=9) == 7.0, "it is reached"
    bins = [[Bin([3, 2], 0)], [Bin([1, 0], 2)]]
    assert level_by_swaps([7.0, 3.0], bins, lengths, seconds, goal_seconds=5.0, most_swaps=9) == 5.0


def test_a_shorter_sequence_that_takes_too_long_is_not_taken_for_a_longer_one():
    """Trees of sequences may take less time than shorter sequences."""
    short = ShortSequences([0, 1, 2], [3, 5, 8], [10.0, 3.0, 6.0])
    short.drop(1)
    assert short.fill(20, 4.0) == ([], 20, 4.0)
    assert short.fill(20, 16.0) == ([2, 0], 9, 0.0)


def test_an_exchange_for_a_longer_sequence_that_takes_less_needs_room():
    """Trees see fewer pairs than a sequence of their length."""
    lengths, seconds = np.array([5, 5, 8, 2]), np.array([10.0, 10.0, 6.0, 6.0])
    for room, expected in ((2, 20.0), (3, 16.0)):
        bins = [[Bin([0, 1], room)], [Bin([2, 3], 0)]]
        assert level_by_swaps([20.0, 12.0], bins, lengths, seconds, goal_seconds=0.0, most_swaps=1) == expected


def test_thousands_of_sequences_a_rank_are_not_compared_all_with_all() -> None:
    """Of 2 x 5,000 all pairs once took 625 MB; evenly chosen ones level as well."""
    lengths = np.arange(10_000) % 60 + 1
    seconds = lengths.astype(np.float64)
    bins = [[Bin(list(range(5_000)), 0)], [Bin(list(range(5_000, 10_000)), 2_000)]]
    loads = [float(seconds[:5_000].sum()) + 1_001.0, float(seconds[5_000:].sum())]
    tracemalloc.start()
    end = level_by_swaps(loads, bins, lengths, seconds, goal_seconds=0.0, most_swaps=50)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert end <= sum(loads) / 2 + 0.5
    assert peak < 50e6


@given(st.data())
def test_exchanges_lose_no_load_overrun_no_room_and_end_nothing_later(data):
    capacity = 20
    ranks = data.draw(st.integers(1, 5))
    lengths = np.array(sorted(data.draw(st.lists(st.integers(1, capacity), max_size=20))), dtype=np.int64)
    seconds = lengths + 0.1 * lengths**2
    bins: list[list[Bin]] = [[Bin([], capacity)] for _ in range(ranks)]
    for index, length in enumerate(lengths.tolist()):
        packs = bins[data.draw(st.integers(0, ranks - 1))]
        if packs[-1].room_tokens < length:
            packs.append(Bin([], capacity))
        packs[-1].indices.append(index)
        packs[-1].room_tokens -= length

    def loads() -> list[float]:
        return [float(sum(seconds[i] for each in packs for i in each.indices)) for packs in bins]

    before = loads()
    end = level_by_swaps(before, bins, lengths, seconds, goal_seconds=0.0, most_swaps=50)
    assert end <= max(before) + 1e-9
    assert abs(end - max(loads())) < 1e-9
    assert sorted(i for packs in bins for each in packs for i in each.indices) == list(range(len(lengths)))
    for each in (each for packs in bins for each in packs):
        assert each.room_tokens == capacity - sum(lengths[i] for i in each.indices) >= 0
