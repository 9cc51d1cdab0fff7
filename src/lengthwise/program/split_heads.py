"""Split heads: which heads of which tokens a rank attends, and what its group exchanges for that.

The ranks of a piece with `heads: u` form groups of u neighbours. An all-to-all turns (own tokens, all heads) into (the
group's tokens, one u-th of the heads), group g is position g of a ring of d / u, and a second all-to-all returns the
results. DeepSpeed-Ulysses (arXiv 2309.14509); with rings: USP (arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lengthwise.core.cut import chunk_bounds
from lengthwise.core.plan import Piece
from lengthwise.program.records import ALL_HEADS, Content, HeadRange, Transfer


def heads_of(piece: Piece, position: int) -> HeadRange:
    """Return the heads that a position of the piece attends."""
    return HeadRange(part=position % piece.heads, parts=piece.heads) if piece.heads > 1 else ALL_HEADS


def ring_bounds(length: int, piece: Piece) -> tuple[int, ...]:
    """Return the borders of a sequence's chunks in the ring of groups, two chunks per group."""
    return chunk_bounds(length, piece.degree, piece.shares)[:: piece.heads]


def group_of(piece: Piece, position: int) -> range:
    """Return the positions of the group of a position."""
    first = position - position % piece.heads
    return range(first, first + piece.heads)


def exchange_transfers(
    piece: Piece, index: int, tokens: Sequence[int], content: Content, position: int | None = None
) -> Iterator[Transfer]:
    """Yield the messages of the groups of piece `index`, of `position` only if given. tokens: tokens by position."""
    goes_home = content in (Content.OUT, Content.DQKV)  # to the rank that holds the tokens
    owners: Iterable[int] = range(piece.degree) if position is None else group_of(piece, position)
    for owner in owners:
        for member in group_of(piece, owner) if tokens[owner] else ():
            if member != owner and position in (None, owner, member):
                source, target = (member, owner) if goes_home else (owner, member)
                yield Transfer(
                    source=piece.ranks[source],
                    target=piece.ranks[target],
                    piece=index,
                    content=content,
                    owner=owner,
                    tokens=tokens[owner],
                    heads=heads_of(piece, member),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Tokens `start` to `stop` of the shard of one position."""

    position: int
    start: int
    stop: int


def group_runs(piece: Piece, lengths: Sequence[int], position: int) -> Iterator[TokenRun]:
    """Yield the places of a group's tokens at its positions, in the order in which the group attends to them."""
    group = group_of(piece, position)
    offsets = dict.fromkeys(group, 0)
    for length in lengths:
        bounds = chunk_bounds(length, piece.degree, piece.shares)
        high = {each: 2 * piece.degree - 1 - each for each in group}
        lows = {each: bounds[each + 1] - bounds[each] for each in group}
        for each in group:
            yield TokenRun(position=each, start=offsets[each], stop=offsets[each] + lows[each])
        for each in reversed(group):
            start = offsets[each] + lows[each]
            offsets[each] = start + bounds[high[each] + 1] - bounds[high[each]]
            yield TokenRun(position=each, start=start, stop=offsets[each])
