"""Skyline packing: rings that fill the line, never one over another."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner.placement.skyline import Moldable, pack_skyline
from lengthwise.planner.problem.topology import Topology

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
    cost = Cost(linear_seconds=1.0, hop_seconds=50.0)
    line = pack_skyline(_moldable(cost, (100, 3, 8)), Topology(cost, 5), cost)
    assert [ring.degree for ring in line.rings] == [3]


@given(
    rings=st.lists(st.tuples(st.integers(1, 500), st.integers(2, 13), st.integers(0, 30)), max_size=40),
    ranks=st.integers(13, 40),
    hop=st.sampled_from([0.0, 3.0]),
    fixed=st.sampled_from([0.0, 7.0]),
)
def test_pack_skyline_places_each_ring_once_where_its_ranks_are_free(
    rings: list[tuple[int, int, int]], ranks: int, hop: float, fixed: float
) -> None:
    cost = Cost(linear_seconds=1.0, quadratic_seconds=0.01, fixed_seconds=fixed, hop_seconds=hop)
    widest_first = sorted(rings, key=lambda ring: -ring[1])
    moldable = _moldable(cost, *((length, degree, degree + more) for length, degree, more in widest_first))
    line = pack_skyline(moldable, Topology(cost, ranks), cost)
    placed = line.rings
    assert sorted(ring.sequence for ring in placed) == list(range(len(rings)))
    waits = {(before, rank): seconds for rank, _, before, seconds in line.gaps.longest_first(0.0)}
    clock = np.zeros(ranks)
    for number, ring in enumerate(placed):
        asked = moldable[ring.sequence]
        assert asked.degree <= ring.degree <= asked.most
        assert 0 <= ring.first <= ring.first + ring.degree <= ranks
        start = clock[ring.first : ring.first + ring.degree].max()
        for rank in range(ring.first, ring.first + ring.degree):
            assert waits.pop((number, rank), 0.0) == start - clock[rank]
        seconds = cost.piece_seconds([asked.length], ring.degree) + fixed
        clock[ring.first : ring.first + ring.degree] = start + seconds
    assert not waits
    assert clock.tolist() == line.free.tolist()


def test_pack_skyline_stays_inside_a_node_where_its_neighbour_lies_across_its_border() -> None:
    """After a ring of 3, ranks 3 to 7 are free together: beside it one of 2 would cross a border (nodes of 4)."""
    cost = replace(all_terms_cost(named_shape("llama-7b"), named_hardware("h100")), ranks_per_node=4)
    rings = _moldable(cost, (90_000, 3, 3), (20_000, 2, 2))
    assert [ring.first for ring in pack_skyline(rings, Topology(LINEAR, 8), cost).rings] == [0, 3]
    line = pack_skyline(rings, Topology(cost, 8), cost)
    assert [ring.first for ring in line.rings] == [0, 6]
    assert line.rings[1].seconds == cost.piece_seconds([20_000], 2) + cost.fixed_seconds
