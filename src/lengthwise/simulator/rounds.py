"""Clocks of the ranks of one microbatch through its passes: blocks, grouped transfers, copies.

Each layer and pass goes as `attention.planned` runs it. Stage by stage a rank posts its grouped call, computes the
blocks of that stage and waits for the call: a transfer starts when both sides have posted it and takes the latency of
its link and its bytes. Ranks in several pieces share their link between them, and what the ranks of a node send to
other nodes at a stage shares the node's uplink, where that is less than their links together. In the backward pass
gradients follow the keys two hops behind. All layers are alike: the first is run, in which ranks that are late hold up
the others, and the second; the others take as long as that. What comes out: clocks of every rank, exact to the stage,
in O(hops) array operations a pass. A microbatch of one ring that shares nothing is left to `rings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.cost import AllTermsCost, Pass
from lengthwise.simulator.rings import MicrobatchClocks, RingPass, ring_clocks, with_copies
from lengthwise.simulator.stages import Floats, PieceStages, piece_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A piece's stages; its ranks' places in the microbatch and their nodes, at [position, member of the group]."""

    stages: PieceStages
    places: NDArray[np.int64]
    nodes: NDArray[np.int64]


def microbatch_clocks(microbatch: Microbatch, tokens: Sequence[int], cost: AllTermsCost) -> MicrobatchClocks:
    """Run one microbatch whose ranks start together."""
    if len(microbatch.pieces) == 1 and not cost.shares_uplinks:
        return ring_clocks([microbatch], tokens, cost)[0]
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
    copied, forward, total = with_copies(ends, held, microbatch.offload, microbatch.recompute, cost)
    return MicrobatchClocks(ranks=ranks, forward=forward, total=total, compute=compute, copied=copied, held_tokens=held)


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
    """One ring in one layer of one pass: what each rank computes and sends at each stage, at [position, member]."""

    def __init__(self, piece: _Placed, each: Pass, cost: AllTermsCost, *, backward: bool) -> None:
        self._pass = RingPass(piece.stages, each, cost, backward=backward)
        self.num_stages = self._pass.num_stages
        self.places, self.targets = piece.places, np.roll(piece.places, -1, axis=0)
        self.nodes, self.target_nodes = piece.nodes, np.roll(piece.nodes, -1, axis=0)
        self.num_nodes = int(piece.nodes.max()) + 1
        self.near = piece.stages.near[:, None]
        self.latency = self._pass.latency[:, None]  # seconds before the first byte of a message
        self._uplink = np.where(piece.stages.near, np.inf, cost.uplink_bytes_per_second)

    def blocks(self, hop: int) -> Floats:
        """Return the seconds of the blocks of `hop`."""
        return self._pass.blocks(hop)[:, None]

    def send_seconds(self, hop: int) -> Floats:
        """Return how long the message to the next position takes at `hop`; 0 where there is none."""
        return self._pass.send_seconds(hop)[:, None]

    def uplink_seconds(self, hop: int) -> Floats:
        """Return how long the uplink of the node takes for a message, were it alone; 0 inside a node."""
        return (self._pass.payload(hop) / self._uplink)[:, None]
