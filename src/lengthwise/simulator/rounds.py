"""Clocks of the ranks of one microbatch through its passes: blocks, grouped transfers, copies.

Each layer and pass goes as `attention.planned` runs it. Stage by stage a rank posts its grouped call, computes the
blocks of that stage and waits for the call: a transfer starts when both sides have posted it and takes the latency of
its link and its bytes. Ranks in several pieces share their link between them, and what the ranks of a node send to
other nodes at a stage shares the node's uplink, where that is less than their links together. In the backward pass
gradients follow the keys two hops behind. All layers are alike: the first is run, in which ranks that are late hold up
the others, and the second; the others take as long as that. What comes out: clocks of every rank, exact to the stage,
in O(hops) array operations a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.cost import AllTermsCost, Pass
from lengthwise.simulator.stages import Floats, PieceStages, piece_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchClocks:
    """Seconds of each rank of a microbatch, in the order of `ranks`, counted from its common start.

    forward: when the forward pass is done. total: when the backward pass is. compute: of these, arithmetic and
    launches. copied: time by which copies to and from the host hold a rank up.
    """

    ranks: tuple[int, ...]
    forward: Floats
    total: Floats
    compute: Floats
    copied: Floats
    held_tokens: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A piece's stages; its ranks' places in the microbatch and their nodes, at [position, member of the group]."""

    stages: PieceStages
    places: NDArray[np.int64]
    nodes: NDArray[np.int64]


def microbatch_clocks(microbatch: Microbatch, tokens: Sequence[int], cost: AllTermsCost) -> MicrobatchClocks:
    """Run one microbatch whose ranks start together."""
    ranks = microbatch.ranks
    place = {rank: number for number, rank in enumerate(ranks)}
    first = min(ranks) // cost.ranks_per_node
    pieces = []
    for piece in microbatch.pieces:
        places = np.array([place[rank] for rank in piece.ranks]).reshape(-1, piece.heads)
        stages = piece_stages(piece, [tokens[i] for i in piece.sequences], cost)
        nodes = np.array(piece.ranks).reshape(-1, piece.heads) // cost.ranks_per_node - first
        pieces.append(_Placed(stages=stages, places=places, nodes=nodes))
    held = np.zeros(len(ranks))
    for each in pieces:
        held[each.places] += each.stages.held[:, None]
    clock, compute, ends, computes = np.zeros(len(ranks)), np.zeros(len(ranks)), [], []
    for each in cost.passes(microbatch.recompute):
        clock, worked = _run_pass(pieces, clock, held, each, cost, backward=each is cost.backward)
        compute = compute + worked
        ends.append(clock)
        computes.append(worked)
    copy = cost.copy_seconds(held, microbatch.offload, microbatch.recompute)
    out = np.maximum(0.0, copy - ends[0])
    into = np.maximum(0.0, copy - (ends[-1] - ends[0]))
    return MicrobatchClocks(
        ranks=ranks,
        forward=ends[0] + out,
        total=ends[-1] + out + into,
        compute=compute,
        copied=out + into,
        held_tokens=held,
    )


def _run_pass(
    pieces: Sequence[_Placed], clock: Floats, held: Floats, each: Pass, cost: AllTermsCost, *, backward: bool
) -> tuple[Floats, Floats]:
    """Run all layers of one pass; return the clocks after it and the arithmetic in it."""
    own = (each.linear * cost.work.linear_seconds * held + each.linear * cost.fixed_seconds) / cost.layers
    exchange = np.zeros_like(held)
    blocks = np.zeros_like(held)
    for piece in pieces:
        exchange[piece.places] += each.exchange * piece.stages.exchange[:, None]
        blocks[piece.places] += each.attention * piece.stages.blocks.sum(axis=0)[:, None]
    worked = cost.layers * (own + blocks)
    if not each.ring or all(piece.stages.positions == 1 for piece in pieces):
        return clock + worked + cost.layers * exchange, worked
    first = _run_layer(pieces, clock + own + exchange, each, cost, backward=backward)
    if cost.layers == 1:
        return first, worked
    second = _run_layer(pieces, first + own + exchange, each, cost, backward=backward)
    return second + (cost.layers - 2) * (second - first), worked


def _run_layer(pieces: Sequence[_Placed], clock: Floats, each: Pass, cost: AllTermsCost, *, backward: bool) -> Floats:
    rings = [_Ring(piece, each, cost, backward=backward) for piece in pieces if piece.stages.positions > 1]
    if len(pieces) == 1 and not cost.shares_uplinks:
        clock = clock.copy()
        clock[rings[0].places] = _run_alone(rings[0], clock[rings[0].places])
        return clock
    local = [piece for piece in pieces if piece.stages.positions == 1]
    for hop in range(max(ring.num_stages for ring in rings)):
        end = clock.copy()
        for piece in local if hop == 0 else ():
            end[piece.places] += each.attention * piece.stages.blocks[0][:, None]
        live = [ring for ring in rings if hop < ring.num_stages]
        for ring in live:
            end[ring.places] += ring.blocks(hop)
        sends = [ring.send_seconds(hop) for ring in live]
        took = _shared_seconds(live, sends, hop, len(clock), cost)
        for ring, seconds in zip(live, took, strict=True):
            begin = np.maximum(clock[ring.places], clock[ring.targets])
            done = np.where(seconds > 0, begin + seconds, 0.0)
            end[ring.places] = np.maximum(end[ring.places], done)
            end[ring.targets] = np.maximum(end[ring.targets], done)
        clock = end
    return clock


def _run_alone(ring: _Ring, clock: Floats) -> Floats:
    """Run a layer of a ring whose ranks are in no other piece, so that no link is shared; clocks go by position."""
    positions = len(clock)
    following, before = (np.arange(positions) + 1) % positions, np.arange(positions) - 1
    for hop in range(ring.num_stages):
        seconds = ring.send_seconds(hop)
        done = np.where(seconds > 0, np.maximum(clock, clock[following]) + seconds, 0.0)
        clock = np.maximum(clock + ring.blocks(hop), np.maximum(done, done[before]))
    return clock


def _shared_seconds(
    rings: Sequence[_Ring], sends: Sequence[Floats], hop: int, ranks: int, cost: AllTermsCost
) -> list[Floats]:
    """Tell how long the messages of a stage take beside each other: over the links of ranks, and over uplinks."""
    load = np.zeros((2, ranks))
    for ring, seconds in zip(rings, sends, strict=True):
        load[0, ring.places] += seconds
        load[1, ring.targets] += seconds
    together = [np.maximum(load[0, ring.places], load[1, ring.targets]) for ring in rings]
    if cost.shares_uplinks:
        uplinks = np.zeros((2, max(ring.num_nodes for ring in rings)))
        for ring in rings:
            np.add.at(uplinks[0], ring.nodes, ring.uplink_seconds(hop))
            np.add.at(uplinks[1], ring.target_nodes, ring.uplink_seconds(hop))
        for number, ring in enumerate(rings):
            shared = ring.latency + np.maximum(uplinks[0, ring.nodes], uplinks[1, ring.target_nodes])
            together[number] = np.where(ring.near, together[number], np.maximum(together[number], shared))
    return [np.where(seconds > 0, took, 0.0) for seconds, took in zip(sends, together, strict=True)]


class _Ring:
    """One ring in one layer of one pass: what each position computes and sends at each stage."""

    def __init__(self, piece: _Placed, each: Pass, cost: AllTermsCost, *, backward: bool) -> None:
        self._stages, self._attention = piece.stages, each.attention
        self._hops = piece.stages.positions
        self.num_stages = self._hops + 1 if backward else self._hops
        self.places, self.targets = piece.places, np.roll(piece.places, -1, axis=0)
        self.nodes, self.target_nodes = piece.nodes, np.roll(piece.nodes, -1, axis=0)
        self.num_nodes = int(piece.nodes.max()) + 1
        near = piece.stages.near
        self.near = near[:, None]
        rate = np.where(near, cost.near.bytes_per_second, cost.far.bytes_per_second)
        self._latency = np.where(near, cost.near.hop_seconds, cost.far.hop_seconds) / cost.layers
        self._uplink = np.where(near, np.inf, cost.uplink_bytes_per_second)
        shard_bytes = piece.stages.tokens * (cost.ring_bytes / cost.layers)
        self._twice = np.concatenate((shard_bytes, shard_bytes))  # entry hops + p - t: the shard that p holds at hop t
        self._rate = rate
        self._keys = cost.forward.ring
        self._gradients = each.ring - cost.forward.ring if backward else 0.0

    def blocks(self, hop: int) -> Floats:
        """Return the seconds of the blocks of `hop`, for each rank of each position."""
        if hop >= self._hops:
            return np.zeros((self._hops, 1))
        return self._attention * self._stages.blocks[hop][:, None]

    def send_seconds(self, hop: int) -> Floats:
        """Return how long the message of each position to the next one takes at `hop`; 0 where there is none."""
        payload = self._payload(hop)
        return np.where(payload > 0, self._latency + payload / self._rate, 0.0)[:, None]

    def uplink_seconds(self, hop: int) -> Floats:
        """Return how long the uplink of each position's node takes for its message, were it alone; 0 inside a node."""
        return (self._payload(hop) / self._uplink)[:, None]

    @property
    def latency(self) -> Floats:
        """Seconds before the first byte of a message of each position."""
        return self._latency[:, None]

    def _payload(self, hop: int) -> Floats:
        payload = self._keys * self._held_at(hop) if hop < self._hops - 1 else np.zeros(self._hops)
        if self._gradients and hop >= 2:
            payload = payload + self._gradients * self._held_at(hop - 1)
        return payload

    def _held_at(self, hop: int) -> Floats:
        return self._twice[self._hops - hop : 2 * self._hops - hop]
