"""Exchanges between ranks: no load is lost, no room overrun, and nothing ends later than before."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.planner.placement.swaps import Bin, level_by_swaps


def test_a_pair_levels_exactly_by_an_exchange() -> None:
    lengths, seconds = np.array([1, 2, 3, 4]), np.array([1.0, 2.0, 3.0, 4.0])
    bins = [[Bin([3, 2], 0)], [Bin([1, 0], 0)]]
    end = level_by_swaps([7.0, 3.0], bins, lengths, seconds, goal_seconds=5.0, most_swaps=9)
    assert end == 7.0, "no room: nothing may be exchanged for less"
    bins = [[Bin([3, 2], 0)], [Bin([1, 0], 2)]]
    assert level_by_swaps([7.0, 3.0], bins, lengths, seconds, goal_seconds=5.0, most_swaps=9) == 5.0


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
def test_properties(data: st.DataObject) -> None:
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


def test_a_goal_that_is_reached_ends_the_search() -> None:
    bins = [[Bin([0, 1], 0)], [Bin([], 9)]]
    lengths, seconds = np.array([2, 4]), np.array([2.0, 4.0])
    assert level_by_swaps([6.0, 0.0], bins, lengths, seconds, goal_seconds=6.0, most_swaps=9) == 6.0
