"""Clocks of the ranks of one microbatch through its passes: blocks, grouped transfers, copies.

Each layer and pass goes as `attention.planned` runs it. Stage by stage a rank posts its grouped call, computes the
blocks of that stage and waits for the call: a transfer starts when both sides have posted it and takes the latency of
its link and its bytes; ranks in several pieces share their link between them. In the backward pass gradients follow
the keys two hops behind. All layers are alike: the first is run, in which ranks that are late hold up the others, and
the second; the others take as long as that. What comes out: clocks of every rank, exact to the stage, in O(hops) array
operations a pass.
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
    """A piece's stages, and where its ranks are in the microbatch, at [position, member of the group]."""

    stages: PieceStages
    places: NDArray[np.int64]


def microbatch_clocks(microbatch: Microbatch, tokens: Sequence[int], cost: AllTermsCost) -> MicrobatchClocks:
    """Run one microbatch whose ranks start together."""
    ranks = microbatch.ranks
    place = {rank: number for number, rank in enumerate(ranks)}
    pieces = []
    for piece in microbatch.pieces:
        places = np.array([place[rank] for rank in piece.ranks]).reshape(-1, piece.heads)
        stages = piece_stages(piece, [tokens[i] for i in piece.sequences], cost)
        pieces.append(_Placed(stages=stages, places=places))
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
    local = [piece for piece in pieces if piece.stages.positions == 1]
    apart = len(pieces) == 1  # no rank is in two pieces, so no link is shared
    for hop in range(max(ring.num_stages for ring in rings)):
        end = clock.copy()
        for piece in local if hop == 0 else ():
            end[piece.places] += each.attention * piece.stages.blocks[0][:, None]
        live = [ring for ring in rings if hop < ring.num_stages]
        for ring in live:
            end[ring.places] += ring.blocks(hop)
        sends = [ring.send_seconds(hop) for ring in live]
        load = np.zeros((2, len(clock)))
        for ring, seconds in zip(live, sends, strict=True) if not apart else ():
            load[0, ring.places] += seconds
            load[1, ring.targets] += seconds
        for ring, seconds in zip(live, sends, strict=True):
            begin = np.maximum(clock[ring.places], clock[ring.targets])
            took = (
                seconds if apart else np.where(seconds > 0, np.maximum(load[0, ring.places], load[1, ring.targets]), 0)
            )
            done = np.where(seconds > 0, begin + took, 0.0)
            end[ring.places] = np.maximum(end[ring.places], done)
            end[ring.targets] = np.maximum(end[ring.targets], done)
        clock = end
    return clock


class _Ring:
    """One ring in one layer of one pass: what each position computes and sends at each stage."""

    def __init__(self, piece: _Placed, each: Pass, cost: AllTermsCost, *, backward: bool) -> None:
        self._stages, self._attention = piece.stages, each.attention
        self._hops = piece.stages.positions
        self.num_stages = self._hops + 1 if backward else self._hops
        self.places, self.targets = piece.places, np.roll(piece.places, -1, axis=0)
        near = piece.stages.near
        rate = np.where(near, cost.near.bytes_per_second, cost.far.bytes_per_second)
        self._latency = np.where(near, cost.near.hop_seconds, cost.far.hop_seconds) / cost.layers
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
        payload = self._keys * self._held_at(hop) if hop < self._hops - 1 else np.zeros(self._hops)
        if self._gradients and hop >= 2:
            payload = payload + self._gradients * self._held_at(hop - 1)
        return np.where(payload > 0, self._latency + payload / self._rate, 0.0)[:, None]

    def _held_at(self, hop: int) -> Floats:
        return self._twice[self._hops - hop : 2 * self._hops - hop]
