"""Ring order: by absolute parity, never more than four peers."""

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.program import ring_order
from lengthwise.program.ring_order import interval_microbatch


def test_ring_order_visits_evens_up_and_odds_down() -> None:
    assert ring_order(0, 6) == (0, 2, 4, 5, 3, 1)
    assert ring_order(1, 4) == (2, 4, 3, 1)
    assert ring_order(3, 1) == (3,)


@given(first=st.integers(0, 500), degree=st.integers(1, 300))
def test_ring_order_hops_at_most_two_ranks(first: int, degree: int) -> None:
    ring = ring_order(first, degree)
    assert sorted(ring) == list(range(first, first + degree))
    assert all(abs(a - b) <= 2 for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))


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
