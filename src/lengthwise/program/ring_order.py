"""The order in which a ring visits its ranks, chosen so that no rank talks to more than four others.

Even positions of the interval upward, then odd ones downward, by the parity of the rank itself: 1..4 as 2, 4, 3, 1.
Messages go two ranks along the line, one at its ends, so all connections are made once, at the start. Groups that split
heads are visited in the same way, and a planner may choose another order; before a step with new edges, one grouped
call connects them, which all ranks know from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lengthwise.core.plan import Microbatch, Piece

if TYPE_CHECKING:
    from lengthwise.program.lower import MicrobatchProgram

_LINE = 2  # the longest distance of a message in this order


def ring_order(first: int, degree: int, heads: int = 1) -> tuple[int, ...]:
    """List the ranks of [first, first + degree) in ring order, in groups of `heads` ranks.

    In groups of two, ranks 0 to 11 are visited 0, 1 | 4, 5 | 8, 9 | 10, 11 | 6, 7 | 2, 3.
    """
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
    """Return a microbatch of one piece over [first, first + degree), in ring order. shares: those in line order."""
    ranks = ring_order(first, degree)
    weights = None if shares is None else tuple(shares[rank - first] for rank in ranks)
    return Microbatch(pieces=(Piece(ranks=ranks, sequences=tuple(sequences), shares=weights),))


def line_peers(rank: int, ranks: int) -> tuple[int, ...]:
    """List the ranks at distance 1 and 2 on the line of ranks."""
    return tuple(peer for peer in range(max(0, rank - _LINE), min(ranks, rank + _LINE + 1)) if peer != rank)


def ring_peers(programs: Iterable[MicrobatchProgram], rank: int) -> set[int]:
    """Return the ranks with which `rank` exchanges keys or heads in these microbatches."""
    peers: set[int] = set()
    for program in programs:
        for _, piece, position in program.pieces_of(rank):
            first = position - position % piece.heads
            near = [first + place for place in range(piece.heads)]
            near += [(position + step) % piece.degree for step in (-piece.heads, piece.heads)]
            peers.update(piece.ranks[each] for each in near)
    return peers


def far_from(rank: int, peers: Iterable[int]) -> tuple[int, ...]:
    """List those of `peers` that are more than two ranks from `rank`, ascending."""
    return tuple(sorted(peer for peer in set(peers) if abs(peer - rank) > _LINE))
