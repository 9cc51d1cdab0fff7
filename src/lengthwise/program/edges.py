"""Which ranks talk to each other, so that connections are made where nobody waits for anything else.

Rings in the order of the line reach ranks at distance 1 and 2 (`ring_order`): those are connected once, at the start.
Groups that split heads also reach their own ranks, and rings over them as far as two groups: a step whose plan has
them connects what it needs for the first time, in one grouped call before its first round. All ranks have the plan, so
both ends of an edge know of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from lengthwise.program.lower import MicrobatchProgram

_LINE = 2  # the farthest that a ring in the order of the line reaches


def line_peers(rank: int, ranks: int) -> tuple[int, ...]:
    """List the ranks at distance 1 and 2 on the line of ranks."""
    return tuple(peer for peer in range(max(0, rank - _LINE), min(ranks, rank + _LINE + 1)) if peer != rank)


def head_peers(programs: Iterable[MicrobatchProgram], rank: int) -> tuple[int, ...]:
    """List the ranks farther away that `rank` talks to in pieces that split heads, ascending."""
    peers: set[int] = set()
    for program in programs:
        for _, piece, position in program.pieces_of(rank):
            if piece.heads > 1:
                first = position - position % piece.heads
                near = [first + place for place in range(piece.heads)]
                near += [(position + step) % piece.degree for step in (-piece.heads, piece.heads)]
                peers.update(piece.ranks[each] for each in near)
    return tuple(sorted(peer for peer in peers if abs(peer - rank) > _LINE))
