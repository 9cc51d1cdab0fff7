"""Clocks of microbatches that are one ring each and share no link, many of one shape at a time; see `rounds`.

Most microbatches of a plan are a ring for itself, and a stage of a ring is a few operations on as many numbers as it
has positions. So rings of equally many positions run side by side, as rows of the same arrays: thousands of rings of
two ranks take as many operations as one. Each row is what the ring alone would be, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.plan import Microbatch
from lengthwise.cost import AllTermsCost, Pass
from lengthwise.simulator.stages import Floats, PieceStages, stack_stages

_AT_ONCE = 2**21  # blocks of rings that are run side by side, 8 bytes each


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


class RingPass:
    """Rings in one layer of one pass: what each position computes and sends at each stage; positions go last."""

    def __init__(self, stages: PieceStages, each: Pass, cost: AllTermsCost, *, backward: bool) -> None:
        self._blocks, self._attention = stages.blocks, each.attention
        self._hops = stages.positions
        self.num_stages = self._hops + 1 if backward else self._hops
        self._rate = np.where(stages.near, cost.near.bytes_per_second, cost.far.bytes_per_second)
        self.latency = np.where(stages.near, cost.near.hop_seconds, cost.far.hop_seconds) / cost.layers
        shard_bytes = stages.tokens * (cost.ring_bytes / cost.layers)
        # Entry hops + p - t: the shard that position p holds at hop t.
        self._twice = np.concatenate((shard_bytes, shard_bytes), axis=-1)
        self._keys = cost.forward.ring
        self._gradients = each.ring - cost.forward.ring if backward else 0.0

    def blocks(self, hop: int) -> Floats:
        """Return the seconds of the blocks of `hop`, for each rank of each position."""
        return self._attention * self._blocks[hop] if hop < self._hops else np.zeros(self._blocks.shape[1:])

    def payload(self, hop: int) -> Floats:
        """Return the bytes that each position sends to the next one at `hop`."""
        payload = self._keys * self._held_at(hop) if hop < self._hops - 1 else np.zeros(self._blocks.shape[1:])
        if self._gradients and hop >= 2:
            payload = payload + self._gradients * self._held_at(hop - 1)
        return payload

    def send_seconds(self, hop: int) -> Floats:
        """Return how long the message of each position to the next one takes at `hop`; 0 where there is none."""
        payload = self.payload(hop)
        return np.where(payload > 0, self.latency + payload / self._rate, 0.0)

    def _held_at(self, hop: int) -> Floats:
        return self._twice[..., self._hops - hop : 2 * self._hops - hop]


def ring_clocks(
    microbatches: Sequence[Microbatch], tokens: Sequence[int], cost: AllTermsCost
) -> list[MicrobatchClocks]:
    """Run microbatches of one piece each, of the same degree, heads, offload and kind of recomputation.

    Ranks of each start together; messages take their links alone, so nodes must not share uplinks.
    """
    positions = microbatches[0].pieces[0].degree // microbatches[0].pieces[0].heads
    most = max(1, _AT_ONCE // positions**2)
    parts = (microbatches[first : first + most] for first in range(0, len(microbatches), most))
    return [clocks for part in parts for clocks in _run(part, tokens, cost)]


def _run(microbatches: Sequence[Microbatch], tokens: Sequence[int], cost: AllTermsCost) -> list[MicrobatchClocks]:
    pieces = [microbatch.pieces[0] for microbatch in microbatches]
    stages = stack_stages(pieces, [[tokens[i] for i in piece.sequences] for piece in pieces], cost)
    offload, recompute = microbatches[0].offload, microbatches[0].recompute
    clock, compute = np.zeros_like(stages.held), np.zeros_like(stages.held)
    ends = []
    for each in cost.passes(recompute):
        clock, worked = _run_pass(stages, clock, each, cost, backward=each is cost.backward)
        compute = compute + worked
        ends.append(clock)
    copied, forward, total = with_copies(ends, stages.held, offload, recompute, cost)
    places = np.argsort([piece.ranks for piece in pieces], axis=1)
    columns = [
        np.take_along_axis(np.repeat(values, pieces[0].heads, axis=1), places, axis=1)
        for values in (forward, total, compute, copied, stages.held)
    ]
    names = ("forward", "total", "compute", "copied", "held_tokens")
    return [
        MicrobatchClocks(ranks=microbatch.ranks, **dict(zip(names, row, strict=True)))
        for microbatch, *row in zip(microbatches, *columns, strict=True)
    ]


def with_copies(
    ends: Sequence[Floats], held: Floats, offload: float, recompute: str, cost: AllTermsCost
) -> tuple[Floats, Floats, Floats]:
    """Tell by how much copies hold ranks up whose passes end at `ends` without; and when forward and backward end."""
    copy = cost.copy_seconds(held, offload, recompute)
    out = np.maximum(0.0, copy - ends[0])
    into = np.maximum(0.0, copy - (ends[-1] - ends[0]))
    return out + into, ends[0] + out, ends[-1] + out + into


def _run_pass(
    stages: PieceStages, clock: Floats, each: Pass, cost: AllTermsCost, *, backward: bool
) -> tuple[Floats, Floats]:
    """Run all layers of one pass; return the clocks after it and the arithmetic in it."""
    own = (each.linear * cost.work.linear_seconds * stages.held + each.linear * cost.fixed_seconds) / cost.layers
    exchange = each.exchange * stages.exchange
    worked = cost.layers * (own + each.attention * stages.blocks.sum(axis=0))
    if not each.ring or stages.positions == 1:
        return clock + worked + cost.layers * exchange, worked
    rings = RingPass(stages, each, cost, backward=backward)
    first = _run_layer(rings, clock + own + exchange)
    if cost.layers == 1:
        return first, worked
    second = _run_layer(rings, first + own + exchange)
    return second + (cost.layers - 2) * (second - first), worked


def _run_layer(rings: RingPass, clock: Floats) -> Floats:
    """Run one layer: a message starts when both sides have posted it, a stage ends with its blocks and messages."""
    for hop in range(rings.num_stages):
        seconds = rings.send_seconds(hop)
        done = np.where(seconds > 0, np.maximum(clock, _next(clock)) + seconds, 0.0)
        clock = np.maximum(clock + rings.blocks(hop), np.maximum(done, _before(done)))
    return clock


def _next(values: Floats) -> Floats:
    """Let each position see the one behind it in the ring."""
    return np.concatenate((values[..., 1:], values[..., :1]), axis=-1)


def _before(values: Floats) -> Floats:
    """Let each position see the one before it in the ring."""
    return np.concatenate((values[..., -1:], values[..., :-1]), axis=-1)
