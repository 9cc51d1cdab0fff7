"""Ring order: by absolute parity, never more than four peers."""

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.program import ring_order
from lengthwise.program.ring_order import interval_microbatch


def test_ring_order_visits_evens_up_and_odds_down() -> None:
    assert ring_order(0, 6) == (0, 2, 4, 5, 3, 1)
    assert ring_order(1, 4) == (2, 4, 3, 1)
    assert ring_order(3, 1) == (3,)


@given(first=st.integers(0, 500), groups=st.integers(1, 40), heads=st.sampled_from([1, 2, 4, 8, 16]))
def test_rings_of_groups_visit_neighbours_group_by_group(first: int, groups: int, heads: int) -> None:
    ring = ring_order(first, groups * heads, heads)
    assert sorted(ring) == list(range(first, first + groups * heads))
    chunks = [ring[place : place + heads] for place in range(0, len(ring), heads)]
    assert all(list(chunk) == list(range(chunk[0], chunk[0] + heads)) for chunk in chunks)
    starts = [chunk[0] for chunk in chunks]
    assert all(abs(a - b) <= 2 * heads for a, b in zip(starts, (*starts[1:], starts[0]), strict=True))


def test_groups_of_heads_stay_in_their_node_where_they_can() -> None:
    assert ring_order(8, 12, 2) == (8, 9, 12, 13, 16, 17, 18, 19, 14, 15, 10, 11)
    for heads in (2, 4, 8):
        ring = ring_order(16, 32, heads)
        assert all(ring[i] // 8 == ring[i - i % heads] // 8 for i in range(32))


def test_ring_order_meets_at_most_four_peers_over_all_intervals() -> None:
    ranks = 13
    peers: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for first in range(ranks):
        for degree in range(2, ranks - first + 1):
            ring = ring_order(first, degree)
            for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
                peers[a].add(b)
                peers[b].add(a)
    for rank, met in peers.items():
        assert met <= {rank - 2, rank - 1, rank + 1, rank + 2}


def test_interval_microbatch_is_one_piece_in_ring_order() -> None:
    (piece,) = interval_microbatch(1, 4, [7, 3]).pieces
    assert (piece.ranks, piece.sequences) == ((2, 4, 3, 1), (7, 3))
