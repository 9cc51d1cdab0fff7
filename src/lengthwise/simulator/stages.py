"""What each position of a piece does in one layer, as arrays: blocks of attention, and shards that travel.

The same blocks and messages as `program.lower_microbatch` writes one by one, summed over the sequences of a piece: the
work of all (queries of j, keys of i) is one product of matrices, so a pack of a thousand sequences over 256 ranks takes
milliseconds where its 65 million block tasks would take minutes. Tests hold the two against each other. Two things
differ: sliding windows make the work smaller but do not shorten a ring's way, and groups that split heads, which the
lowering does not know yet, are one position each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import chunk_bounds
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Piece
from lengthwise.cost import AllTermsCost

Floats = NDArray[np.float64]
_EXACT = 2**62  # products below fit NumPy's whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStages:
    """One piece in one layer; arrays go by ring position, of which each is `heads` ranks.

    blocks: attention in seconds of one rank, forward and backward together, at [hop, position].
    tokens: of the shard of each position, that its ranks hold or split the heads of.
    held: tokens that count as one rank's own: its part of the linear work.
    near: whether the way to the next position stays inside a node.
    exchange: seconds of one rank's all-to-all, forward and backward together.
    """

    blocks: Floats
    tokens: Floats
    held: Floats
    near: NDArray[np.bool_]
    exchange: Floats

    @property
    def positions(self) -> int:
        """Positions of the ring."""
        return len(self.tokens)


def piece_stages(piece: Piece, lengths: Sequence[int], cost: AllTermsCost) -> PieceStages:
    """Lay out one layer of a piece.

    Raises:
        PlanError: unequal shares together with split heads.
    """
    positions = piece.degree // piece.heads
    if piece.shares is not None and piece.heads > 1:
        raise PlanError(
            f"piece on ranks {piece.ranks[:4]}...",
            expected="shares or split heads",
            got="both",
            remedy="Plan without one of them.",
        )
    chunks = _chunks(lengths, positions, piece.shares)
    low, high = chunks[:, :positions], np.ascontiguousarray(chunks[:, : positions - 1 : -1])
    shards = low + high
    groups = np.array(piece.ranks).reshape(positions, piece.heads)
    nodes = groups // cost.ranks_per_node
    own = np.all(nodes == nodes[:, :1], axis=1)
    outside = min(cost.far.bytes_per_second, cost.uplink_bytes_per_second / cost.ranks_per_node)
    links = np.where(own, cost.near.bytes_per_second, outside)
    held = shards.sum(axis=0) / piece.heads
    return PieceStages(
        blocks=_blocks(np.array(lengths, dtype=np.float64), low, high, cost) / (piece.heads * cost.layers),
        tokens=shards.sum(axis=0) * max(1.0, piece.heads / cost.kv_heads) / piece.heads,
        held=held,
        near=np.all(nodes == np.roll(nodes, -1, axis=0), axis=1),
        exchange=cost.exchange_bytes / cost.layers * held * (piece.heads - 1) / piece.heads / links,
    )


def _chunks(lengths: Sequence[int], positions: int, shares: tuple[float, ...] | None) -> Floats:
    """Return the tokens of each sequence's 2 x positions chunks, as `core.cut` cuts them."""
    if shares is None and max(lengths) * 2 * positions < _EXACT:
        borders = np.array(lengths, dtype=np.int64)[:, None] * np.arange(2 * positions + 1) // (2 * positions)
    else:
        borders = np.array([chunk_bounds(length, positions, shares) for length in lengths])
    return np.diff(borders, axis=1).astype(np.float64)


def _blocks(lengths: Floats, low: Floats, high: Floats, cost: AllTermsCost) -> Floats:
    """Return seconds at [hop, position] of all layers; at hop t position j holds the keys of position j - t."""
    positions = low.shape[1]
    seconds = cost.attention_seconds(lengths, positions) / (lengths * lengths)  # a squared token at this block size
    shards, weighted = low + high, seconds[:, None]
    if positions == 1:
        return (seconds @ (shards * shards))[None, :]
    seen_below = 2 * (weighted * shards).T @ low  # [j, i], i below j: all queries, the low keys
    seen_above = 2 * (weighted * high).T @ shards  # i above j: the high queries, all keys
    position = np.arange(positions)
    homes = (position[None, :] - position[:, None]) % positions  # [hop, position]
    everyone = np.broadcast_to(position, homes.shape)
    blocks = np.where(homes < everyone, seen_below[everyone, homes], seen_above[everyone, homes])
    blocks[0] = seconds @ (shards * shards)
    return blocks
