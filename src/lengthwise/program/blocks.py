"""Which blocks of attention a position computes against the keys of another position.

All positions share the borders of chunks, so without a window no mask is needed: a position's own keys are one causal
block; both its query chunks see the low chunk of a lower position; its high chunk sees both chunks of a higher one. A
window drops and trims blocks. `branches` adds the blocks of sequences that continue another one. What tokens of images
see beyond causality are blocks of their own (docs/decisions/images-both-ways.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lengthwise.program.records import BlockTask, HeadRange, MutualSpans, Segment

# Tiles on the diagonal are at least this long: launching shorter ones costs more than the masked work they save.
LEAST_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens `start` to `stop` of one sequence, adjacent in a shard from `offset` on."""

    offset: int
    start: int
    stop: int

    def part(self, start: int, stop: int) -> TokenSpan:
        """Return the span of the sequence's tokens from `start` to `stop`."""
        return TokenSpan(offset=self.offset + start - self.start, start=start, stop=stop)

    @property
    def end(self) -> int:
        """The offset in the shard after its last token."""
        return self.offset + self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Queries and the keys that they see. window, ahead: see `BlockTask`."""

    queries: TokenSpan
    keys: TokenSpan
    causal: bool = False
    window: int | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """The shard of one ring position as queries: some heads of `piece`, from row `row` of the rank on."""

    piece: int
    position: int
    shard: Sequence[Segment]
    row: int
    heads: HeadRange

    def task(self, meeting: Meeting, *, sequence: int, owner: int) -> BlockTask:
        """Return the block of a meeting with keys of `owner`."""
        queries, keys = meeting.queries, meeting.keys
        return BlockTask(
            piece=self.piece,
            sequence=sequence,
            owner=owner,
            q_start=self.row + queries.offset,
            q_stop=self.row + queries.end,
            kv_start=keys.offset,
            kv_stop=keys.end,
            causal=meeting.causal,
            window=meeting.window,
            distance=queries.start - keys.start,
            heads=self.heads,
            ahead=meeting.ahead,
        )


def block_tasks(
    queries: Queries, held: Sequence[Segment], *, owner: int, window: int | None, mutual: MutualSpans | None = None
) -> Iterator[BlockTask]:
    """Yield the blocks of one position's queries against the shard of position `owner`, diagonal blocks first.

    Shards list the low and the high chunk of each sequence; key offsets count from the start of `held`. window: tokens
    that a query sees, itself included. mutual: those of all sequences.
    """
    own, q_offset, kv_offset = queries.shard, 0, 0
    for low, high, held_low, held_high in zip(own[::2], own[1::2], held[::2], held[1::2], strict=True):
        q_spans, kv_spans = chunk_spans(low, high, q_offset), chunk_spans(held_low, held_high, kv_offset)
        if window is None or high.stop <= window:
            blocks = _whole_blocks(q_spans, kv_spans, own=owner == queries.position)
        else:
            blocks = _window_blocks(q_spans, kv_spans, window)
        ahead = _ahead_blocks(q_spans, kv_spans, mutual.spans[low.sequence]) if mutual is not None else ()
        for block in (*blocks, *ahead):
            yield queries.task(block, sequence=low.sequence, owner=owner)
        q_offset += low.num_tokens + high.num_tokens
        kv_offset += held_low.num_tokens + held_high.num_tokens


def positions_seeing(bounds: Sequence[int], owner: int, window: int) -> Iterator[int]:
    """Yield the positions, some twice, whose queries see keys of `owner`. bounds: the 2 x degree + 1 borders."""
    last = len(bounds) - 2
    for chunk in (owner, last - owner):
        stop = bounds[chunk + 1]
        if bounds[chunk] < stop:
            for later in range(chunk + 1, min(bisect_left(bounds, stop - 1 + window), last + 1)):
                if bounds[later] < bounds[later + 1]:
                    yield min(later, last - later)


def positions_ahead(bounds: Sequence[int], owner: int, spans: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the positions, some twice, with earlier tokens of a mutual span of which `owner` has tokens."""
    last = len(bounds) - 2
    for start, stop in spans:
        for chunk in (owner, last - owner):
            if max(start, bounds[chunk]) < min(stop, bounds[chunk + 1]):
                for earlier in range(chunk):
                    if max(start, bounds[earlier]) < bounds[earlier + 1]:
                        yield min(earlier, last - earlier)


def chunk_spans(low: Segment, high: Segment, offset: int) -> list[TokenSpan]:
    """Return the spans of a sequence's two chunks, which lie in a shard from `offset` on; none is empty."""
    middle = offset + low.num_tokens
    spans = [
        TokenSpan(offset=offset, start=low.start, stop=low.stop),
        TokenSpan(offset=middle, start=high.start, stop=high.stop),
    ]
    if low.stop == high.start:  # the innermost position holds two chunks side by side
        spans = [joined(spans)]
    return [span for span in spans if span.stop > span.start]


def joined(spans: Sequence[TokenSpan]) -> TokenSpan:
    """Join adjacent spans of a shard into one."""
    tokens = spans[-1].end - spans[0].offset
    return TokenSpan(offset=spans[0].offset, start=spans[0].start, stop=spans[0].start + tokens)


def _whole_blocks(q_spans: Sequence[TokenSpan], kv_spans: Sequence[TokenSpan], *, own: bool) -> Iterator[Meeting]:
    if own:
        if q_spans:
            yield Meeting(queries=joined(q_spans), keys=joined(q_spans), causal=True)
        return
    for seeing, keys in groupby(kv_spans, lambda keys: [span for span in q_spans if span.start >= keys.stop]):
        if seeing:  # keys seen by the same queries are one block; these queries are adjacent, up to the last
            yield Meeting(queries=joined(seeing), keys=joined(list(keys)))


def _ahead_blocks(
    q_spans: Sequence[TokenSpan], kv_spans: Sequence[TokenSpan], spans: Sequence[tuple[int, int]]
) -> Iterator[Meeting]:
    """Yield the later keys that queries of mutual spans see: half a square of their chunk, and all of later chunks.

    A window hides none of them: it hides keys that lie before.
    """
    for start, stop in spans:
        for queries in (_common(each, start, stop) for each in q_spans):
            for keys in (_common(each, start, stop) for each in kv_spans):
                if queries is None or keys is None:
                    continue
                if queries.stop <= keys.start:
                    yield Meeting(queries=queries, keys=keys)
                elif queries.start == keys.start and queries.stop - queries.start > 1:
                    first, last = queries.start, queries.stop
                    yield Meeting(queries=queries.part(first, last - 1), keys=keys.part(first + 1, last), ahead=True)


def _common(span: TokenSpan, start: int, stop: int) -> TokenSpan | None:
    first, last = max(span.start, start), min(span.stop, stop)
    return span.part(first, last) if first < last else None


def _window_blocks(q_spans: Sequence[TokenSpan], kv_spans: Sequence[TokenSpan], window: int) -> Iterator[Meeting]:
    for queries in q_spans:
        for keys in kv_spans:
            if queries.start == keys.start and queries.stop == keys.stop:
                yield from _diagonal_tiles(queries, keys, window)
    for queries in q_spans:
        for keys in kv_spans:
            if queries.start >= keys.stop:
                yield from edge_blocks(queries, keys, window)


def _diagonal_tiles(queries: TokenSpan, keys: TokenSpan, window: int) -> Iterator[Meeting]:
    tile = max(window, LEAST_TILE_TOKENS)
    for first in range(queries.start, queries.stop, tile):
        last = min(first + tile, queries.stop)
        oldest = max(keys.start, first - window + 1)
        edge = window if last - 1 - oldest >= window else None
        yield Meeting(queries=queries.part(first, last), keys=keys.part(oldest, last), causal=True, window=edge)


def edge_blocks(queries: TokenSpan, keys: TokenSpan, window: int) -> Iterator[Meeting]:
    """Trim to queries that see a key and keys that are seen; a block in which all queries see all keys has no edge.

    The part with an edge has fewer queries than keys, as flash kernels need: their windows count from the last key.
    """
    q_stop = min(queries.stop, keys.stop - 1 + window)
    kv_start = max(keys.start, queries.start - window + 1)
    if q_stop <= queries.start or kv_start >= keys.stop:
        return
    edge_start = min(q_stop, kv_start + window)
    for start, stop, edge in ((queries.start, edge_start, None), (edge_start, q_stop, window)):
        if start < stop:
            yield Meeting(queries=queries.part(start, stop), keys=keys.part(kv_start, keys.stop), window=edge)
