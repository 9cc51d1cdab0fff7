"""Placing rings on the line of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.planner.placement.line import place_rings
from lengthwise.planner.problem.topology import Extras


@given(data=st.data(), ranks=st.integers(1, 17))
def test_place_rings_starts_each_as_early_as_any_interval_allows(data: st.DataObject, ranks: int) -> None:
    degrees = st.integers(1, ranks) | st.integers(1, min(3, ranks))  # the latter: many of one degree, swept together
    rows = data.draw(st.lists(st.tuples(degrees, st.integers(1, 9)), max_size=40))
    rows = sorted(rows, reverse=True) if data.draw(st.booleans()) else rows
    line = place_rings([(i, degree, float(time)) for i, (degree, time) in enumerate(rows)], ranks)
    assert sorted(ring.sequence for ring in line.rings) == list(range(len(rows)))
    assert [ring.start_seconds for ring in line.rings] == sorted(ring.start_seconds for ring in line.rings)
    clock = np.zeros(ranks)
    for ring, (degree, seconds) in zip(sorted(line.rings, key=lambda ring: ring.sequence), rows, strict=True):
        start = clock[ring.first : ring.first + degree].max()
        assert start == min(clock[a : a + degree].max() for a in range(ranks - degree + 1))
        clock[ring.first : ring.first + degree] = start + seconds
    assert clock.tolist() == line.free.tolist()
    work = sum(degree * seconds for degree, seconds in rows)
    waits = sum(seconds for _, _, _, seconds in line.gaps.longest_first(0.0))
    assert work + waits == clock.sum()
    assert work == line.busy_seconds


@given(data=st.data(), ranks=st.integers(1, 17), node=st.integers(1, 6))
def test_place_rings_on_nodes_ends_each_as_early_as_any_interval_allows(
    data: st.DataObject, ranks: int, node: int
) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, min(ranks, 5)), st.integers(1, 9)), max_size=40))
    rows = sorted(rows, reverse=True)
    penalty = data.draw(st.integers(1, 5))

    def extra(_sequence: int, degree: int) -> Extras | None:
        if degree > node:
            return None
        firsts = np.arange(ranks - degree + 1)
        more = penalty * (firsts % node + degree > node).astype(np.float64)
        return Extras(lambda some: (more[some], more[some]))

    timed = [(i, degree, float(time)) for i, (degree, time) in enumerate(rows)]
    line = place_rings(timed, ranks, extra_seconds=extra)
    clock = np.zeros(ranks)
    for ring, (degree, seconds) in zip(sorted(line.rings, key=lambda ring: ring.sequence), rows, strict=True):
        more = extra(0, degree)
        more = np.zeros(ranks - degree + 1) if more is None else more.seconds
        ends = [clock[a : a + degree].max() + seconds + more[a] for a in range(ranks - degree + 1)]
        assert ring.start_seconds + ring.seconds == min(ends)
        assert ring.seconds == seconds + more[ring.first]
        clock[ring.first : ring.first + degree] = ring.start_seconds + ring.seconds
    assert clock.tolist() == line.free.tolist()


def test_place_rings_backfills_at_the_end_of_a_hole_where_it_is_quicker() -> None:
    """The hole is ranks 3 to 7 until 5; from 3 a ring of 2 would cross a border (nodes of 4) and be too long."""
    rows = [(0, 3, 5.0), (1, 8, 2.0), (2, 2, 4.0)]

    def extra(_sequence: int, degree: int) -> Extras | None:
        more = np.where(np.arange(8 - degree + 1) % 4 + degree > 4, 2.0, 0.0)
        return Extras(lambda some: (more[some], more[some])) if degree <= 4 else None

    line = place_rings(rows, 8, backfilled=True, extra_seconds=extra)
    assert [(ring.sequence, ring.first, ring.seconds) for ring in line.rings] == [(0, 0, 5), (2, 6, 4), (1, 0, 2)]
    waits = line.gaps.longest_first(0.0)
    assert waits == [(3, -1, 2, 5.0), (4, -1, 2, 5.0), (5, -1, 2, 5.0), (6, 1, 2, 1.0), (7, 1, 2, 1.0)]


def test_place_rings_fills_the_hole_beside_a_wide_ring_with_a_narrower_one() -> None:
    """Four of six ranks, then all: the two beside the first wait for 5, and a ring of two fits there."""
    rows = [(0, 4, 5.0), (1, 6, 2.0), (2, 2, 4.0)]
    assert place_rings(rows, 6).free.max() == 11
    line = place_rings(rows, 6, backfilled=True)
    assert line.free.max() == 7
    assert [(ring.sequence, ring.first, ring.start_seconds) for ring in line.rings] == [(0, 0, 0), (2, 4, 0), (1, 0, 5)]
    assert line.gaps.longest_first(0.0) == [(4, 1, 2, 1.0), (5, 1, 2, 1.0)]


@given(data=st.data(), ranks=st.integers(2, 17))
def test_place_rings_backfilled_never_lets_two_rings_meet(data: st.DataObject, ranks: int) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(2, ranks), st.integers(1, 30)), max_size=40))
    rows = sorted(rows, key=lambda row: -row[0])
    line = place_rings([(i, degree, float(time)) for i, (degree, time) in enumerate(rows)], ranks, backfilled=True)
    assert sorted(ring.sequence for ring in line.rings) == list(range(len(rows)))
    clock, last = np.zeros(ranks), np.full(ranks, -1)
    waits = {(before, rank): (after, seconds) for rank, after, before, seconds in line.gaps.longest_first(0.0)}
    for number, ring in enumerate(line.rings):
        assert (ring.degree, ring.seconds) == rows[ring.sequence]
        taken = range(ring.first, ring.first + ring.degree)
        assert all(clock[rank] <= ring.start_seconds for rank in taken)
        for rank in taken:
            if clock[rank] < ring.start_seconds:
                assert waits.pop((number, rank)) == (last[rank], ring.start_seconds - clock[rank])
            clock[rank], last[rank] = ring.start_seconds + ring.seconds, number
    assert not waits
    assert clock.tolist() == line.free.tolist()
    assert last.tolist() == line.last.tolist()


def test_place_rings_remembers_the_gap_before_a_ring() -> None:
    line = place_rings([(0, 3, 5.0), (1, 2, 4.0)], 4)
    assert line.rings[1].first == 0  # all start at 5: the interval without idle ranks
    assert line.gaps.longest_first(0.0) == []
    line = place_rings([(0, 2, 5.0), (1, 3, 4.0), (2, 2, 1.0), (3, 3, 1.0)], 3)
    assert line.gaps.longest_first(0.0) == [(2, -1, 1, 5.0), (2, 1, 3, 1.0)]
    assert line.gaps.longest_first(2.0) == [(2, -1, 1, 5.0)]
    assert line.busy_seconds == 10 + 12 + 2 + 3
    assert line.free.tolist() == [11, 11, 11]
    line = place_rings([(0, 1, 3.0), (1, 2, 5.0), (2, 2, 1.0)], 3)
    assert line.rings[2].first == 1  # rank 0 would wait from 3 to 5
