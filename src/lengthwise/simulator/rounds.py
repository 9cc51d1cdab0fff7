"""Clocks of the ranks of a microbatch through its passes: blocks, grouped transfers, copies.

As in `attention.planned`, a rank posts a ring step's grouped call, computes its blocks and waits. A transfer starts
when both sides have posted it; pieces share their rank's link, ranks their node's uplink. Two layers are simulated; the
others take as long as the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.cost import Choice, Cost, PassShares
from lengthwise.cost.links import Floats
from lengthwise.simulator.piece_layers import PieceLayer, piece_layer, stack_layers

_AT_ONCE = 2**21  # blocks of rings simulated side by side, 8 bytes each
_NO_NODES = np.zeros((1, 1), dtype=np.int64)  # for rings that share no uplinks and so read no nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchClocks:
    """Seconds of each rank of a microbatch, in the order of `ranks`, from its common start.

    forward, total: end of the forward pass, and of the microbatch. compute: arithmetic and overhead. copied: waits for
    copies.
    """

    ranks: tuple[int, ...]
    forward: Floats
    total: Floats
    compute: Floats
    copied: Floats
    held_tokens: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """One layer of a piece on its ranks.

    places: index of its ranks in an array of clocks, at [..., position, member of a group]. nodes: nodes of the same
    ranks, [position, member]; only read if uplinks are shared.
    """

    layer: PieceLayer
    places: Any
    nodes: NDArray[np.int64]


def microbatch_clocks(microbatch: Microbatch, tokens: Sequence[int], cost: Cost) -> MicrobatchClocks:
    """Run one microbatch whose ranks start together. tokens: lengths of all sequences of the step."""
    ranks = microbatch.ranks
    place = {rank: number for number, rank in enumerate(ranks)}
    first = min(ranks) // cost.ranks_per_node
    pieces = [
        _Placed(
            layer=piece_layer(piece, [tokens[i] for i in piece.sequences], cost),
            places=np.array([place[rank] for rank in piece.ranks]).reshape(-1, piece.heads),
            nodes=np.array(piece.ranks).reshape(-1, piece.heads) // cost.ranks_per_node - first,
        )
        for piece in microbatch.pieces
    ]
    return MicrobatchClocks(ranks=ranks, **_run(pieces, (len(ranks),), microbatch, cost))


def ring_clocks(microbatches: Sequence[Microbatch], tokens: Sequence[int], cost: Cost) -> list[MicrobatchClocks]:
    """Run microbatches of one piece each, on links of their own; degree, heads, offload and recomputation are equal."""
    positions = microbatches[0].pieces[0].degree // microbatches[0].pieces[0].heads
    most = max(1, _AT_ONCE // positions**2)
    parts = (microbatches[first : first + most] for first in range(0, len(microbatches), most))
    return [clocks for part in parts for clocks in _run_rings(part, tokens, cost)]


def _run_rings(microbatches: Sequence[Microbatch], tokens: Sequence[int], cost: Cost) -> list[MicrobatchClocks]:
    """Run rings as rows of one array, entry j for position j; members of a group run alike."""
    pieces = [microbatch.pieces[0] for microbatch in microbatches]
    layer = stack_layers(pieces, [[tokens[i] for i in piece.sequences] for piece in pieces], cost)
    ran = _run([_Placed(layer=layer, places=(..., None), nodes=_NO_NODES)], layer.tokens.shape, microbatches[0], cost)
    by_rank = np.argsort([piece.ranks for piece in pieces], axis=1)
    arrays = [
        np.take_along_axis(np.repeat(values, pieces[0].heads, axis=1), by_rank, axis=1) for values in ran.values()
    ]
    return [
        MicrobatchClocks(ranks=microbatch.ranks, **dict(zip(ran, row, strict=True)))
        for microbatch, *row in zip(microbatches, *arrays, strict=True)
    ]


def _run(pieces: Sequence[_Placed], shape: tuple[int, ...], microbatch: Microbatch, cost: Cost) -> dict[str, Floats]:
    """Run all passes of pieces on clocks of this shape; return the arrays of `MicrobatchClocks` by name."""
    held, clock, compute, ends = np.zeros(shape), np.zeros(shape), np.zeros(shape), []
    for piece in pieces:
        held[piece.places] += piece.layer.held[..., None]
    for each in cost.passes(microbatch.recompute):
        clock, worked = _run_pass(pieces, clock, held, each, cost)
        compute = compute + worked
        ends.append(clock)
    choice = Choice(offload=microbatch.offload, recompute=microbatch.recompute)
    copy = cost.copy_seconds(held, choice) if microbatch.offload else 0.0 * held
    out = np.maximum(0.0, copy - ends[0])
    into = np.maximum(0.0, copy - (ends[-1] - ends[0]))
    return {
        "forward": ends[0] + out,
        "total": ends[-1] + out + into,
        "compute": compute,
        "copied": out + into,
        "held_tokens": held,
    }


def _run_pass(
    pieces: Sequence[_Placed], clock: Floats, held: Floats, each: PassShares, cost: Cost
) -> tuple[Floats, Floats]:
    """Run all layers of one pass; return the clocks after it, and its arithmetic."""
    own = (each.linear * cost.linear_seconds * held + each.linear * cost.fixed_seconds) / cost.layers
    exchange, blocks = np.zeros_like(held), np.zeros_like(held)
    for piece in pieces:
        own[piece.places] += each.linear * piece.layer.beside[..., None]
        exchanged = each.exchange * piece.layer.exchange + each.states * piece.layer.states
        exchange[piece.places] += exchanged[..., None]
        blocks[piece.places] += each.attention * piece.layer.blocks.sum(axis=0)[..., None]
    worked = cost.layers * (own + blocks)
    rings = [_Ring(piece, each, cost) for piece in pieces if piece.layer.positions > 1]
    if not each.ring or not rings:
        return clock + worked + cost.layers * exchange, worked
    lone = [(piece, each.attention * piece.layer.blocks[0]) for piece in pieces if piece.layer.positions == 1]
    first = _run_layer(rings, lone, clock + own + exchange, cost)  # late ranks delay the others
    if cost.layers == 1:
        return first, worked
    second = _run_layer(rings, lone, first + own + exchange, cost)
    return second + (cost.layers - 2) * (second - first), worked


def _run_layer(rings: Sequence[_Ring], lone: Sequence[tuple[_Placed, Floats]], clock: Floats, cost: Cost) -> Floats:
    """Run the rings of one layer, and the blocks of pieces that need no keys of other ranks."""
    for step in range(max(ring.num_steps for ring in rings)):
        end = clock.copy()
        for piece, seconds in lone if step == 0 else ():
            end[piece.places] += seconds[..., None]
        live = [ring for ring in rings if step < ring.num_steps]
        for ring in live:
            end[ring.places] += ring.blocks(step)
        sends = [ring.send_seconds(step) for ring in live]
        if len(live) > 1 or cost.shares_uplinks:
            sends = _shared_seconds(live, sends, step, len(clock), cost)
        for ring, seconds in zip(live, sends, strict=True):
            posted = clock[ring.places]
            done = np.where(seconds > 0, np.maximum(posted, _next(posted)) + seconds, 0.0)
            end[ring.places] = np.maximum(end[ring.places], np.maximum(done, _before(done)))
        clock = end
    return clock


def _shared_seconds(rings: Sequence[_Ring], sends: Sequence[Floats], step: int, ranks: int, cost: Cost) -> list[Floats]:
    """Return the seconds of a ring step's messages that share links and uplinks."""
    load = np.zeros((2, ranks))
    for ring, seconds in zip(rings, sends, strict=True):
        load[0, ring.places] += seconds
        load[1, ring.places] += _before(seconds)
    together = [np.maximum(load[0, ring.places], _next(load[1, ring.places])) for ring in rings]
    if cost.shares_uplinks:
        uplinks = np.zeros((2, max(int(ring.nodes.max()) for ring in rings) + 1))
        for ring in rings:
            np.add.at(uplinks[0], ring.nodes, ring.uplink_seconds(step))
            np.add.at(uplinks[1], _next(ring.nodes), ring.uplink_seconds(step))
        for number, ring in enumerate(rings):
            shared = ring.latency + np.maximum(uplinks[0, ring.nodes], uplinks[1, _next(ring.nodes)])
            together[number] = np.where(ring.near, together[number], np.maximum(together[number], shared))
    return [np.where(seconds > 0, took, 0.0) for seconds, took in zip(sends, together, strict=True)]


class _Ring:
    """A ring in one layer of one pass: work and messages of each rank at each ring step, at [..., position, 1]."""

    def __init__(self, piece: _Placed, each: PassShares, cost: Cost) -> None:
        layer, self.places, self.nodes = piece.layer, piece.places, piece.nodes
        self._keys, self._gradients = cost.forward.ring, each.ring - cost.forward.ring if each is cost.backward else 0.0
        self._positions = layer.positions
        self.num_steps = self._positions + (each is cost.backward)
        self.near = layer.near[..., None]
        self.latency = np.where(self.near, cost.near.hop_seconds, cost.far.hop_seconds) / cost.layers  # of a message
        self._rate = np.where(self.near, cost.near.bytes_per_second, cost.far.bytes_per_second)
        self._uplink = np.where(self.near, np.inf, cost.uplink_bytes_per_second)
        self._blocks, self._attention = layer.blocks[..., None], each.attention
        shard_bytes = (layer.tokens * (cost.ring_bytes / cost.layers))[..., None]
        self._twice = np.concatenate((shard_bytes, shard_bytes), axis=-2)  # of the owner p - t at [positions + p - t]

    def blocks(self, step: int) -> Floats:
        return self._attention * self._blocks[step] if step < self._positions else np.zeros(self._blocks.shape[1:])

    def payload(self, step: int) -> Floats:
        """Return the bytes that each position sends on; gradients follow the keys two ring steps later."""
        payload = np.zeros(self._blocks.shape[1:])
        if step < self._positions - 1:
            payload = self._keys * self._arrived(step)
        return payload + self._gradients * self._arrived(step - 1) if self._gradients and step >= 2 else payload

    def send_seconds(self, step: int) -> Floats:
        """Return the seconds of each position's message; 0 if it sends none."""
        payload = self.payload(step)
        return np.where(payload > 0, self.latency + payload / self._rate, 0.0)

    def uplink_seconds(self, step: int) -> Floats:
        """Return the seconds of a message alone on the node's uplink; 0 inside a node."""
        return self.payload(step) / self._uplink

    def _arrived(self, step: int) -> Floats:
        """Return the bytes of the shard whose keys each position holds at a ring step."""
        return self._twice[..., self._positions - step : 2 * self._positions - step, :]


def _next(values: NDArray[Any]) -> NDArray[Any]:
    """Return for each position the value of the next in the ring; positions are the last axis but one."""
    return np.concatenate((values[..., 1:, :], values[..., :1, :]), axis=-2)


def _before(values: Floats) -> Floats:
    """Return for each position the value of the previous in the ring."""
    return np.concatenate((values[..., -1:, :], values[..., :-1, :]), axis=-2)
