"""Rings on the line of ranks: as early as any place allows, in holes, and packed by the skyline."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.planner.placement.line import place_rings
from lengthwise.planner.placement.skyline import Moldable, pack_skyline
from lengthwise.planner.problem.topology import Extras, Topology


@given(data=st.data(), ranks=st.integers(1, 17), node=st.none() | st.integers(1, 6))
def test_place_rings_ends_each_as_early_as_any_interval_allows(data, ranks, node):
    """Rings of up to three ranks beside wide ones: many of one degree are swept together."""
    degrees = st.integers(1, ranks) | st.integers(1, min(3, ranks))
    rows = data.draw(st.lists(st.tuples(degrees, st.integers(1, 9)), max_size=40))
    rows = sorted(rows, reverse=True) if node or data.draw(st.booleans()) else rows
    penalty = data.draw(st.integers(1, 5))

    def more(degree):
        firsts = np.arange(ranks - degree + 1)
        crosses = (firsts % (node or 1) + degree > (node or 1)) if degree <= (node or 0) else firsts < 0
        return penalty * crosses.astype(np.float64)

    def extra(_sequence, degree):
        return Extras(lambda some: (more(degree)[some],) * 2) if degree <= (node or 0) else None

    timed = [(i, degree, float(time)) for i, (degree, time) in enumerate(rows)]
    line = place_rings(timed, ranks, extra_seconds=extra)
    starts = [ring.start_seconds for ring in line.rings]
    assert node or starts == sorted(starts)
    assert sorted(ring.sequence for ring in line.rings) == list(range(len(rows)))
    clock = np.zeros(ranks)
    for ring, (degree, seconds) in zip(sorted(line.rings, key=lambda ring: ring.sequence), rows, strict=True):
        ends = [clock[a : a + degree].max() + seconds + late for a, late in enumerate(more(degree))]
        assert ring.start_seconds + ring.seconds == min(ends)
        assert ring.seconds == seconds + more(degree)[ring.first]
        clock[ring.first : ring.first + degree] = min(ends)
    assert clock.tolist() == line.free.tolist()
    work = sum(ring.degree * ring.seconds for ring in line.rings)
    assert work + sum(seconds for *_, seconds in line.gaps.longest_first(0.0)) == clock.sum()
    assert work == line.busy_seconds


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


LINEAR = Cost(linear_seconds=1.0)


def _moldable(cost: Cost, *rings: tuple[int, int, int]) -> list[Moldable]:
    return [
        Moldable(sequence=i, length=length, degree=degree, most=most, seconds=cost.piece_seconds([length], degree))
        for i, (length, degree, most) in enumerate(rings)
    ]


def test_pack_skyline_widens_each_ring_to_what_its_place_asks_for() -> None:
    rings = _moldable(LINEAR, (320, 5, 10), (320, 5, 10), (480, 5, 6), (40, 2, 2))
    line = pack_skyline(rings, Topology(LINEAR, 12), LINEAR)
    assert [ring.degree for ring in line.rings] == [6, 6, 6, 2]
    assert line.gaps.longest_first(0.0) == []
    assert sorted(line.free) == [320 / 6] * 4 + [320 / 6 + 20] * 2 + [320 / 6 + 80] * 6


def test_pack_skyline_keeps_a_degree_where_wider_would_not_be_quicker() -> None:
    cost = plain_cost(linear_seconds=1.0, hop_seconds=50.0)
    line = pack_skyline(_moldable(cost, (100, 3, 8)), Topology(cost, 5), cost)
    assert [ring.degree for ring in line.rings] == [3]


def test_pack_skyline_stays_inside_a_node_where_its_neighbour_lies_across_its_border() -> None:
    """After a ring of 3, ranks 3 to 7 are free together: beside it one of 2 would cross a border (nodes of 4)."""
    cost = replace(all_terms_cost(named_shape("llama-7b"), named_hardware("h100")), ranks_per_node=4)
    rings = _moldable(cost, (90_000, 3, 3), (20_000, 2, 2))
    assert [ring.first for ring in pack_skyline(rings, Topology(LINEAR, 8), cost).rings] == [0, 3]
    line = pack_skyline(rings, Topology(cost, 8), cost)
    assert [ring.first for ring in line.rings] == [0, 6]
    assert line.rings[1].seconds == cost.piece_seconds([20_000], 2) + cost.fixed_seconds
