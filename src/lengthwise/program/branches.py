"""Blocks between sequences: those that continue another one see all of its tokens.

A sequence is cut by itself, whatever it continues. What is added for one that others continue is one block, without a
mask, of the queries of all of them, which lie side by side, against its keys on each position. A window trims it by
positions, which go on from sequence to sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.core.plan import Piece
from lengthwise.program.blocks import Meeting, Queries, TokenSpan, chunk_spans, edge_blocks, joined
from lengthwise.program.records import BlockTask, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The sequence at `place` of a piece, which those at the next places, up to `stop`, continue.

    firsts: position of the first token of the sequences from `place` on.
    """

    place: int
    stop: int
    firsts: tuple[int, ...]


def prefixes_of(piece: Piece, parents: Sequence[int | None], firsts: Sequence[int]) -> tuple[Prefix, ...]:
    """Return the sequences of a piece that others continue. parents, firsts: those of `Plan`, for all sequences."""
    found, path = list[Prefix](), list[int]()  # places whose sequences the next one may continue

    def end(place: int, stop: int) -> None:
        if stop > place + 1:
            those = tuple(firsts[each] for each in piece.sequences[place:stop])
            found.append(Prefix(place=place, stop=stop, firsts=those))

    for place, sequence in enumerate(piece.sequences):
        while path and piece.sequences[path[-1]] != parents[sequence]:
            end(path.pop(), place)
        path.append(place)
    while path:
        end(path.pop(), len(piece.sequences))
    return tuple(found)


def branch_tasks(
    queries: Queries, held: Sequence[Segment], prefix: Prefix, *, owner: int, window: int | None
) -> Iterator[BlockTask]:
    """Yield the blocks of one position's queries against the keys of a prefix that position `owner` holds.

    held: shard of `owner`. window: tokens that a query sees, itself included.
    """
    keys, *_ = _spans_of(held, prefix)
    seeing = [span for spans in _spans_of(queries.shard, prefix)[1:] for span in spans]
    if not keys or not seeing:
        return
    sequence = held[2 * prefix.place].sequence
    if window is None or max(span.stop for span in seeing) - keys[0].start <= window:
        yield queries.task(Meeting(queries=joined(seeing), keys=joined(keys)), sequence=sequence, owner=owner)
        return
    for span in seeing:
        for some in keys:
            for block in edge_blocks(span, some, window):
                yield queries.task(block, sequence=sequence, owner=owner)


def positions_continuing(bounds: Sequence[Sequence[int]], prefix: Prefix, owner: int, window: int) -> Iterator[int]:
    """Yield the positions, some twice, whose queries see a prefix's keys of `owner` through a window.

    bounds: 2 x degree + 1 borders of each sequence of the piece.
    """
    own, last = bounds[prefix.place], len(bounds[prefix.place]) - 2
    for chunk in (owner, last - owner):
        if own[chunk] == own[chunk + 1]:
            continue
        unseen_from = prefix.firsts[0] + own[chunk + 1] - 1 + window
        for borders, first in zip(bounds[prefix.place + 1 : prefix.stop], prefix.firsts[1:], strict=True):
            for later in range(last + 1):
                if borders[later] < borders[later + 1] and first + borders[later] < unseen_from:
                    yield min(later, last - later)


def _spans_of(shard: Sequence[Segment], prefix: Prefix) -> list[list[TokenSpan]]:
    """Return the spans of a prefix, then of each sequence that continues it, by their positions."""
    offset = sum(segment.num_tokens for segment in shard[: 2 * prefix.place])
    found = list[list[TokenSpan]]()
    chunks = shard[2 * prefix.place : 2 * prefix.stop]
    for low, high, first in zip(chunks[::2], chunks[1::2], prefix.firsts, strict=True):
        spans = chunk_spans(low, high, offset)
        found.append([TokenSpan(offset=s.offset, start=first + s.start, stop=first + s.stop) for s in spans])
        offset += low.num_tokens + high.num_tokens
    return found
