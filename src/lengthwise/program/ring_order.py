"""In which order a ring visits its ranks, so that no rank ever meets more than four others.

Evens of the interval upward, then odds downward, by the rank's own parity: 1..4 as 2, 4, 3, 1. Messages go two ranks
along the line, at its ends one, so connections are made once, at the start. Groups that split heads are visited so, and
a planner may have an order of its own; a step with edges beyond the line first connects them in one grouped call, which
all ranks know from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lengthwise.core.plan import Microbatch, Piece

if TYPE_CHECKING:
    from lengthwise.program.lower import MicrobatchProgram

_LINE = 2  # the farthest that a ring in the order of the line reaches


def ring_order(first: int, degree: int, heads: int = 1) -> tuple[int, ...]:
    """List the ranks of [first, first + degree) in the order of the ring, whose groups have `heads` ranks.

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
    """Make a microbatch of one piece over [first, first + degree) in ring order; `shares`: in line order."""
    ranks = ring_order(first, degree)
    weights = None if shares is None else tuple(shares[rank - first] for rank in ranks)
    return Microbatch(pieces=(Piece(ranks=ranks, sequences=tuple(sequences), shares=weights),))


def line_peers(rank: int, ranks: int) -> tuple[int, ...]:
    """List the ranks at distance 1 and 2 on the line of ranks."""
    return tuple(peer for peer in range(max(0, rank - _LINE), min(ranks, rank + _LINE + 1)) if peer != rank)


def ring_peers(programs: Iterable[MicrobatchProgram], rank: int) -> set[int]:
    """Return the ranks that `rank` talks to in the rings of these microbatches, and to split their heads."""
    peers: set[int] = set()
    for program in programs:
        for _, piece, position in program.pieces_of(rank):
            first = position - position % piece.heads
            near = [first + place for place in range(piece.heads)]
            near += [(position + step) % piece.degree for step in (-piece.heads, piece.heads)]
            peers.update(piece.ranks[each] for each in near)
    return peers


def far_from(rank: int, peers: Iterable[int]) -> tuple[int, ...]:
    """List those of `peers` that are not on the line near `rank`, ascending."""
    return tuple(sorted(peer for peer in set(peers) if abs(peer - rank) > _LINE))
