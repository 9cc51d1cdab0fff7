"""In which order a ring visits its ranks, so that no rank ever meets more than four others.

A ring is an interval of the line of ranks, visited evens upward and odds downward, by the parity of the rank itself:
the interval 0..5 is visited 0, 2, 4, 5, 3, 1 and 1..4 is visited 2, 4, 3, 1. Inside an interval every message goes from
r to r + 2 or r - 2, at its two ends to a neighbour. So over all plans ever made rank r exchanges with r - 2, r - 1,
r + 1 and r + 2 only, and the few connections can be made once, at the start.

Where groups of u ranks split heads, a group is u neighbours, so that it stays inside its node where the interval starts
at a multiple of u, and it is the groups that are visited evens upward, odds downward: ranks 0 to 11 in groups of two
are visited 0, 1 | 4, 5 | 8, 9 | 10, 11 | 6, 7 | 2, 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.core.plan import Microbatch, Piece


def ring_order(first: int, degree: int, heads: int = 1) -> tuple[int, ...]:
    """List the ranks of [first, first + degree) in the order of the ring, whose groups have `heads` ranks."""
    if degree == 1:
        return (first,)
    if heads > 1:
        begin = first // heads
        groups = ring_order(begin, degree // heads)
        return tuple(first + (group - begin) * heads + place for group in groups for place in range(heads))
    end = first + degree
    evens, odds = range(first + first % 2, end, 2), range(first + 1 - first % 2, end, 2)
    return (*evens, *reversed(odds))


def interval_microbatch(
    first: int, degree: int, sequences: Sequence[int], shares: Sequence[float] | None = None
) -> Microbatch:
    """Make a microbatch of one piece over the interval [first, first + degree), in the order of the ring.

    `shares`: the weight of each rank of the interval, in the order of the line.
    """
    ranks = ring_order(first, degree)
    weights = None if shares is None else tuple(shares[rank - first] for rank in ranks)
    return Microbatch(pieces=(Piece(ranks=ranks, sequences=tuple(sequences), shares=weights),))
