"""Which blocks of attention a position computes against the keys of another one.

Chunks of all positions have common borders, so without a window no mask is ever needed:
    own keys             one causal block over both chunks (the high chunk sees the whole low one);
    keys of a lower one  both query chunks see all of its low chunk and nothing of its high chunk;
    keys of a higher one only the high query chunk sees anything, and sees both chunks in full.
A sliding window of w lets a query see itself and the w - 1 tokens before it. Blocks outside it vanish, blocks inside
it stay whole, and what its edge crosses is trimmed to queries and keys that meet, so that no row is ever without a
visible key; on the diagonal it is cut into tiles as long as the window, so that work follows the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.program.records import BlockTask, Segment

# Tiles on the diagonal are at least this long: shorter ones cost more in launches than they save in masked work.
LEAST_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Adjacent tokens of one sequence that lie side by side in a shard, the first of them at `offset`."""

    offset: int
    start: int
    stop: int


def block_tasks(
    own: Sequence[Segment], held: Sequence[Segment], *, piece: int, home: int, position: int, window: int | None
) -> Iterator[BlockTask]:
    """Yield the blocks of one position's queries against the shard of position `home`, diagonal ones first.

    `own` and `held` list the shards (low and high chunk of each sequence). Offsets of queries and keys are counted
    from the start of either shard.
    """
    q_offset = kv_offset = 0
    for low, high, held_low, held_high in zip(own[::2], own[1::2], held[::2], held[1::2], strict=True):
        q_spans, kv_spans = _spans(low, high, q_offset), _spans(held_low, held_high, kv_offset)
        if window is None or high.stop <= window:
            blocks = _whole_blocks(q_spans, kv_spans, own=home == position)
        else:
            blocks = _window_blocks(q_spans, kv_spans, window)
        for q_start, q_stop, kv_start, kv_stop, causal, edge, distance in blocks:
            yield BlockTask(
                piece=piece,
                sequence=low.sequence,
                home=home,
                q_start=q_start,
                q_stop=q_stop,
                kv_start=kv_start,
                kv_stop=kv_stop,
                causal=causal,
                window=edge,
                distance=distance,
            )
        q_offset += low.num_tokens + high.num_tokens
        kv_offset += held_low.num_tokens + held_high.num_tokens


_Block = tuple[int, int, int, int, bool, int | None, int]
"""(q_start, q_stop, kv_start, kv_stop, causal, window that cuts it, first query's token - first key's token)."""


def _spans(low: Segment, high: Segment, offset: int) -> list[Span]:
    middle = offset + low.num_tokens
    if low.stop == high.start:  # the innermost position holds two chunks side by side
        spans = [Span(offset=offset, start=low.start, stop=high.stop)]
    else:
        spans = [
            Span(offset=offset, start=low.start, stop=low.stop),
            Span(offset=middle, start=high.start, stop=high.stop),
        ]
    return [span for span in spans if span.stop > span.start]


def _whole_blocks(q_spans: Sequence[Span], kv_spans: Sequence[Span], *, own: bool) -> Iterator[_Block]:
    if own:
        if q_spans:
            first, last = q_spans[0], q_spans[-1]
            stop = last.offset + last.stop - last.start
            yield first.offset, stop, first.offset, stop, True, None, 0
        return
    for keys in kv_spans:
        seeing = [span for span in q_spans if span.start >= keys.stop]
        if seeing:  # spans lie side by side in the shard, and the last ones see most: they are one block
            stop = seeing[-1].offset + seeing[-1].stop - seeing[-1].start
            distance = seeing[0].start - keys.start
            yield seeing[0].offset, stop, keys.offset, keys.offset + keys.stop - keys.start, False, None, distance


def _window_blocks(q_spans: Sequence[Span], kv_spans: Sequence[Span], window: int) -> Iterator[_Block]:
    for queries in q_spans:
        for keys in kv_spans:
            if queries == keys or (queries.start == keys.start and queries.stop == keys.stop):
                yield from _diagonal_tiles(queries, keys, window)
    for queries in q_spans:
        for keys in kv_spans:
            if queries.start >= keys.stop:
                yield from _edge_block(queries, keys, window)


def _diagonal_tiles(queries: Span, keys: Span, window: int) -> Iterator[_Block]:
    tile, length = max(window, LEAST_TILE_TOKENS), queries.stop - queries.start
    for first in range(0, length, tile):
        last = min(first + tile, length)
        oldest = max(0, first - window + 1)
        edge = window if last - 1 - oldest >= window else None
        yield (
            queries.offset + first,
            queries.offset + last,
            keys.offset + oldest,
            keys.offset + last,
            True,
            edge,
            first - oldest,
        )


def _edge_block(queries: Span, keys: Span, window: int) -> Iterator[_Block]:
    """Trim to queries that see a key and keys that are seen; queries that see all of them are a block without edge.

    What is left has fewer queries than keys: flash kernels, whose windows count from the last key and reach no further
    right than there are keys, could not say it otherwise.
    """
    q_stop = min(queries.stop, keys.stop - 1 + window)
    kv_start = max(keys.start, queries.start - window + 1)
    if q_stop <= queries.start or kv_start >= keys.stop:
        return
    edge_start = min(q_stop, kv_start + window)
    for start, stop, edge in ((queries.start, edge_start, None), (edge_start, q_stop, window)):
        if start < stop:
            yield (
                queries.offset + start - queries.start,
                queries.offset + stop - queries.start,
                keys.offset + kv_start - keys.start,
                keys.offset + keys.stop - keys.start,
                False,
                edge,
                start - kv_start,
            )
