"""One layer of a piece as arrays by ring position: blocks of attention, and the shards that ranks send on.

Tests compare it with `program.lower_microbatch`, which takes minutes for what takes milliseconds here. Sliding windows
do not shorten a ring, and a group that splits heads is one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import chunk_bounds
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Piece
from lengthwise.cost import Cost
from lengthwise.cost.links import Floats, Numbers, count_far_rounds

_EXACT = 2**62  # products up to here fit int64


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayer:
    """One piece in one layer; entries are ring positions of `heads` ranks, after an axis of stacked pieces, if any.

    blocks: attention in seconds of one rank, forward and backward together, at [ring_step, position]. tokens: tokens of
    each position's shard, whose ranks hold it or split its heads. held: tokens of one rank, for its linear work. near:
    True if the next position is in the same node. exchange, states: seconds of one rank's all-to-all, and of its sweeps
    of states, forward and backward together. beside: seconds of one rank's linear work beside that of its tokens: scans
    of cut sequences, and images.
    """

    blocks: Floats
    tokens: Floats
    held: Floats
    near: NDArray[np.bool_]
    exchange: Floats
    states: Floats
    beside: Floats

    @property
    def positions(self) -> int:
        """Number of positions of the ring."""
        return self.tokens.shape[-1]


def piece_layer(piece: Piece, lengths: Sequence[int], cost: Cost) -> PieceLayer:
    """Return one layer of a piece; PlanError for unequal shares together with split heads."""
    positions = piece.degree // piece.heads
    if piece.shares is not None and piece.heads > 1:
        where, remedy = f"piece on ranks {piece.ranks[:4]}...", "Plan without one of them."
        raise PlanError(where, expected="shares or split heads", got="both", remedy=remedy)
    chunks = _chunks(lengths, positions, piece.shares)
    blocks = _blocks(np.array(lengths, dtype=np.float64), chunks, cost)
    work = cost.linear_ratio(np.array(lengths, dtype=np.float64), piece.degree)
    return _layer(blocks, _parts(chunks)[2].sum(axis=0), np.array(piece.ranks), piece.heads, cost, len(lengths), work)


def stack_layers(pieces: Sequence[Piece], lengths: Sequence[Sequence[int]], cost: Cost) -> PieceLayer:
    """Return one layer of pieces with equally many ranks and heads; entry i of `lengths` belongs to piece i."""
    heads, ranks = pieces[0].heads, np.array([piece.ranks for piece in pieces])
    positions = pieces[0].degree // heads
    has_several = positions > 1 and any(len(each) > 1 for each in lengths)
    if has_several or any(piece.shares is not None for piece in pieces):
        apart = [piece_layer(piece, each, cost) for piece, each in zip(pieces, lengths, strict=True)]
        fields = ("tokens", "held", "near", "exchange", "states", "beside")
        joined = {name: np.stack([getattr(each, name) for each in apart]) for name in fields}
        return PieceLayer(blocks=np.stack([each.blocks for each in apart], axis=1), **joined)
    flat = [length for each in lengths for length in each]
    tokens = np.array(flat, dtype=np.float64)[:, None]
    if positions == 1:
        starts = np.cumsum([0, *map(len, lengths)])[:-1]
        flat_work = cost.attention_seconds(tokens, 1), tokens, cost.linear_tokens(tokens, heads)
        own, held, work = (np.add.reduceat(each, starts) for each in flat_work)
        return _layer(own[None], held, ranks, heads, cost, np.array([len(each) for each in lengths]), work / held)
    low, high, shards = _parts(_chunks(flat, positions, None))
    own, worth = (each / (tokens * tokens) for each in cost.ring_step_seconds(tokens, positions))
    below = (2 * (worth * shards))[:, :, None] * low[:, None, :]
    above = (2 * (worth * high))[:, :, None] * shards[:, None, :]
    blocks = _by_ring_step(below, above, own * (shards * shards))
    work = cost.linear_tokens(tokens, positions * heads) / tokens
    return _layer(blocks, shards, ranks, heads, cost, 1, work)


def _layer(
    blocks: Floats, shards: Floats, ranks: NDArray[np.int64], heads: int, cost: Cost, sequences: Numbers, work: Numbers
) -> PieceLayer:
    """Return the layer. blocks: seconds of all layers and ranks of a position. work: linear work over its tokens."""
    nodes = ranks.reshape(*shards.shape, heads) // cost.ranks_per_node
    own = np.all(nodes == nodes[..., :1], axis=-1)
    outside = min(cost.far.bytes_per_second, cost.uplink_bytes_per_second / cost.ranks_per_node)
    links = np.where(own, cost.near.bytes_per_second, outside)
    held = shards / heads
    degree, near = shards.shape[-1] * heads, np.all(nodes == np.roll(nodes, -1, axis=-2), axis=-1)
    states = cost.sweep_seconds(degree, count_far_rounds(ranks // cost.ranks_per_node), sequences) / cost.layers
    return PieceLayer(
        blocks=blocks / (heads * cost.layers),
        tokens=shards * max(1.0, heads / cost.kv_heads) / heads,
        held=held,
        near=near,
        exchange=cost.exchange_bytes / cost.layers * held * (heads - 1) / heads / links,
        states=np.broadcast_to(np.expand_dims(states, -1), shards.shape),
        beside=(cost.cut_seconds * (degree > 1) + cost.linear_seconds * (work - 1)) / cost.layers * held,
    )


def _chunks(lengths: Sequence[int], positions: int, shares: tuple[float, ...] | None) -> Floats:
    if shares is None and max(lengths) * 2 * positions < _EXACT:
        borders = np.array(lengths, dtype=np.int64)[:, None] * np.arange(2 * positions + 1) // (2 * positions)
    else:
        borders = np.array([chunk_bounds(length, positions, shares) for length in lengths])
    return np.diff(borders, axis=1).astype(np.float64)


def _parts(chunks: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the low and the high chunk of each position, and their sum."""
    positions = chunks.shape[1] // 2
    low, high = chunks[:, :positions], np.ascontiguousarray(chunks[:, : positions - 1 : -1])
    return low, high, low + high


def _blocks(lengths: Floats, chunks: Floats, cost: Cost) -> Floats:
    """Return seconds at [ring_step, position] of all layers."""
    low, high, shards = _parts(chunks)
    positions = low.shape[1]
    diagonal, others = (each / (lengths * lengths) for each in cost.ring_step_seconds(lengths, positions))
    own = diagonal @ (shards * shards)
    if positions == 1:
        return own[None, :]
    weighted = others[:, None]  # seconds per squared token at this block size
    below = 2 * (weighted * shards).T @ low  # [j, i], i below j: all queries, the low keys
    above = 2 * (weighted * high).T @ shards  # i above j: the high queries, all keys
    return _by_ring_step(below, above, own)


def _by_ring_step(below: Floats, above: Floats, own: Floats) -> Floats:
    """Reorder seconds from [..., j, i], j's queries of i's keys, to [ring_step, ..., j]. own: seconds of ring step 0.

    At ring step t position j holds the keys of position j - t: rows written twice make it a diagonal.
    """
    positions = own.shape[-1]
    number = np.arange(positions)
    seen = np.where(number[None, :] < number[:, None], below, above)
    twice = np.ascontiguousarray(np.concatenate((seen, seen), axis=-1))
    *outer, row, entry = twice.strides
    by_ring_step = np.lib.stride_tricks.as_strided(
        twice[..., positions:], shape=(positions, *own.shape), strides=(-entry, *outer, row + entry), writeable=False
    )
    blocks = by_ring_step.copy()
    blocks[0] = own
    return blocks
