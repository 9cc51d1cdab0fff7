"""Packs: into gaps and onto the least loaded ranks."""

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.planner.gangs import Gap
from lengthwise.planner.packs import ShortSequences, fill_gaps, full_packs, level_ends


def _short(lengths: list[int]) -> ShortSequences:
    ordered = sorted(lengths)
    return ShortSequences(list(range(len(ordered))), ordered, [float(length) for length in ordered])


def test_take_gives_the_longest_that_fits_both_limits() -> None:
    short = _short([1, 5, 5, 9])
    assert [short.take(8, 100.0), short.take(100, 5.5), short.take(100, 0.5), short.take(100, 100.0)] == [2, 1, None, 3]
    assert short.left() == [0]


def test_fill_gaps_leaves_no_gap_too_long() -> None:
    packs = fill_gaps([Gap(rank=2, before=0, seconds=10.0)], _short([8, 4, 3]), capacity_tokens=9, launch_seconds=1.0)
    assert [pack for _, pack in packs] == [[2]]  # 8 and its launch; nothing fits into the second that is left


def test_level_ends_prefers_room_to_a_launch() -> None:
    packs = level_ends([0.0, 20.0], _short([6, 3]), capacity_tokens=9, launch_seconds=100.0)
    assert packs == [(0, [1, 0])]


def test_level_ends_gives_to_the_least_loaded() -> None:
    packs = level_ends([0.0, 5.0], _short([6, 4, 2]), capacity_tokens=6, launch_seconds=0.0)
    assert packs == [(0, [2]), (1, [1]), (0, [0])] or packs == [(0, [2]), (0, [0]), (1, [1])]


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    gaps=st.lists(st.floats(0.1, 80), max_size=6),
    ranks=st.integers(1, 5),
    launch=st.sampled_from([0.0, 0.5, 30.0]),
)
def test_packs_hold_every_sequence_once_within_capacity(
    lengths: list[int], gaps: list[float], ranks: int, launch: float
) -> None:
    short = _short(lengths)
    holes = [Gap(rank=0, before=i, seconds=seconds) for i, seconds in enumerate(gaps)]
    filled = fill_gaps(holes, short, capacity_tokens=50, launch_seconds=launch)
    packs = [pack for _, pack in level_ends([0.0] * ranks, short, capacity_tokens=50, launch_seconds=launch)]
    for gap in holes:
        inside = [launch + sum(short.seconds[i] for i in pack) for hole, pack in filled if hole is gap]
        assert sum(inside) <= gap.seconds * (1 + 1e-12)
    packs += [pack for _, pack in filled]
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(short.lengths[i] for i in pack) <= 50 for pack in packs)


def test_full_packs_take_the_longest_that_still_fits() -> None:
    assert full_packs([9, 8, 7, 6], [1, 4, 5, 6], 10) == [[6, 8], [7, 9]]
    assert full_packs([], [], 10) == []


@given(lengths=st.lists(st.integers(1, 50), max_size=60))
def test_full_packs_hold_each_once_and_close_only_when_nothing_fits(lengths: list[int]) -> None:
    lengths = sorted(lengths)
    packs = full_packs(list(range(len(lengths))), lengths, 50)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for number, pack in enumerate(packs):
        room = 50 - sum(lengths[i] for i in pack)
        assert room >= 0
        assert all(lengths[i] > room for later in packs[number + 1 :] for i in later)
