"""Placing rings on the line of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.planner.gangs import place_rings


def test_place_rings_side_by_side_from_the_lowest_rank() -> None:
    rings, gaps, free = place_rings([(0, 3, 5.0), (1, 2, 4.0)], 6)
    assert [(ring.first, ring.degree) for ring in rings] == [(0, 3), (3, 2)]
    assert gaps == []
    assert free.tolist() == [5, 5, 5, 4, 4, 0]


def test_place_rings_remembers_the_gap_before_a_ring() -> None:
    rings, gaps, free = place_rings([(0, 3, 5.0), (1, 2, 4.0)], 4)
    assert rings[1].first == 0  # all start at 5: the interval without idle ranks
    assert gaps == []
    rings, gaps, free = place_rings([(0, 2, 5.0), (1, 3, 4.0)], 3)
    assert [(gap.rank, gap.before, gap.seconds) for gap in gaps] == [(2, 1, 5.0)]
    assert free.tolist() == [9, 9, 9]


@given(data=st.data(), ranks=st.integers(1, 17))
def test_place_rings_starts_each_as_early_as_any_interval_allows(data: st.DataObject, ranks: int) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, ranks), st.integers(1, 9)), max_size=12))
    rings, gaps, free = place_rings([(i, degree, float(time)) for i, (degree, time) in enumerate(rows)], ranks)
    clock = np.zeros(ranks)
    for ring, (degree, seconds) in zip(rings, rows, strict=True):
        start = clock[ring.first : ring.first + degree].max()
        assert start == min(clock[a : a + degree].max() for a in range(ranks - degree + 1))
        clock[ring.first : ring.first + degree] = start + seconds
    assert clock.tolist() == free.tolist()
    work = sum(degree * seconds for degree, seconds in rows)
    assert work + sum(gap.seconds for gap in gaps) == clock.sum()
