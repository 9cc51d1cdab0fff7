"""Passes over all layers: forward, forward again if activations are recomputed, backward.

Over d ranks in r = d / u positions of u ranks that split the heads, a pass takes a rank

    A + L + max(0, R - A) + h (r - 1) + X + S (d - 1)        seconds:

attention; linear work; keys and values, which hide behind A; latency of ring steps; all-to-all of split heads (Ulysses,
arXiv 2309.14509); rounds of a sweep of the states of all sequences, which hide behind nothing and are not repeated.
In pipelines and over shared uplinks R hides per ring step (docs/decisions/transfers-by-ring-step.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lengthwise.core.cut import position_chunks
from lengthwise.core.plan import RECOMPUTED, kinds_by_layer
from lengthwise.cost.links import Floats, Numbers, Reach, chosen

if TYPE_CHECKING:
    from lengthwise.cost.choices import Choice
    from lengthwise.cost.terms import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShares:
    """One pass over all layers, as shares of forward and backward together."""

    attention: float
    linear: float
    ring: float
    exchange: float
    states: float = 0.5


# Of forward's linear work: norms, RoPE, activations, residuals. By bytes at the memory's rate, 26 % (H200) and 31 %
# (H100) of eager Qwen3-8B, 33 % of a Llama of 1B parameters (docs/decisions/keep-products.md).
ELEMENTWISE = 0.3
# Two products of attention forward and five backward; keys and values in bf16, once more and fp32 gradients backward.
FORWARD = PassShares(attention=2 / 7, linear=1 / 3, ring=1 / 4, exchange=1 / 2)
BACKWARD = PassShares(attention=5 / 7, linear=2 / 3, ring=3 / 4, exchange=1 / 2)


def passes(forward: PassShares, backward: PassShares, recompute: str) -> tuple[PassShares, ...]:
    """List the passes of a microbatch with this kind of recomputation, forward first."""
    attention = products = linear = 0.0  # shares of the layers
    for kind, share in kinds_by_layer(recompute).shares:
        if (again := RECOMPUTED[kind]) is not None:
            attention, linear = attention + share * again.attention, linear + share
            products += share * again.products
    if not linear:
        return forward, backward
    second = PassShares(
        attention=attention * forward.attention,
        linear=(products + (linear - products) * ELEMENTWISE) * forward.linear,
        ring=attention * forward.ring,
        exchange=attention * forward.exchange,
        states=0.0,
    )
    return forward, second, backward


class Part(NamedTuple):
    """A rank's work in forward and backward together, times the degree: tokens, seconds of attention and linear work.

    diagonal: the first ring step's part of attention. sequences: number in the piece. Arrays have an entry per piece or
    rank.
    """

    tokens: Numbers
    attention: Numbers
    diagonal: Numbers
    linear: Numbers
    sequences: Numbers = 1


class Moved(NamedTuple):
    """What a rank sends and waits for, in seconds of both passes.

    transfers: the ring's keys, values and gradients, times the degree. latency: one ring step of one pass. positions:
    number of groups around the ring.
    """

    transfers: Numbers
    latency: Numbers
    positions: Numbers
    degree: Numbers


def part_seconds(cost: Cost, part: Part, total: Numbers, degree: Numbers, choice: Choice, reach: Reach) -> Numbers:
    """Return the seconds of all passes of one rank. total: tokens of the whole piece."""
    heads, near, far, uplink = choice.heads, cost.near, cost.far, cost.uplink_bytes_per_second
    held, positions = part.tokens / degree, degree / heads
    ring = cost.ring_bytes / chosen(
        reach.ring_near, near.bytes_per_second, np.minimum(far.bytes_per_second, uplink / reach.flows)
    )
    repeated = np.maximum(1.0, heads / cost.kv_heads)  # a group wider than the KV heads holds copies of them
    latency = chosen(reach.ring_near, near.hop_seconds, far.hop_seconds)
    moved = Moved(ring * repeated * (total * positions - total), latency, positions, degree)
    exchange = 0.0  # of groups that split heads, all-to-all
    if np.count_nonzero(heads > 1):
        exchanged = min(far.bytes_per_second, uplink / cost.ranks_per_node)
        links = chosen(reach.groups_near, near.bytes_per_second, exchanged)
        exchange = cost.exchange_bytes * held * (heads - 1) / heads / links
    swept = cost.sweep_seconds(degree, reach.far_rounds, part.sequences)
    sweeps, by_ring_step = cost.passes(choice.recompute), cost.stages > 1 or cost.shares_uplinks
    attention = linear = exchanges = states = 0.0
    for sweep in sweeps:
        attention, linear = attention + sweep.attention, linear + sweep.linear
        exchanges, states = exchanges + sweep.exchange, states + sweep.states
    together: Numbers = attention * part.attention + linear * part.linear
    apart: Numbers = exchanges * exchange + states * swept
    rings = [sweep for sweep in sweeps if sweep.ring]
    for sweep in rings:
        if by_ring_step:
            keys = sweeps[0].ring * moved.transfers
            gradients = (sweep.ring - sweeps[0].ring) * moved.transfers if sweep is sweeps[-1] else None
            apart = apart + _exposed_by_ring_step(part, moved, sweep.attention, keys, gradients)
        else:
            together = together + np.maximum(0.0, sweep.ring * moved.transfers - sweep.attention * part.attention)
    if not by_ring_step:
        apart = apart + len(rings) * latency * (positions - 1)
    if np.count_nonzero(choice.offload > 0):
        copy = cost.copy_seconds(held, choice)  # one direction
        first, *others = (sweep.attention * part.attention + sweep.linear * part.linear for sweep in sweeps)
        out, back = (np.maximum(0.0, copy - each / degree) for each in (first, sum(others)))
        apart = apart + out + back
    return together / degree + apart


def _exposed_by_ring_step(part: Part, moved: Moved, share: float, keys: Numbers, gradients: Numbers | None) -> Numbers:
    """Sum the seconds of each ring step of a pass beyond the block beside it, as the simulator runs them.

    Keys hide under all blocks but the last; backward's gradients follow two ring steps later, and the last hide under
    nothing.
    """
    _, latency, positions, degree = moved
    sends = np.maximum(positions - 1, 1)
    diagonal = share * part.diagonal / degree
    block = share * (part.attention - part.diagonal) / (degree * sends)
    keys = keys / (degree * sends) + latency
    first = np.maximum(0.0, keys - diagonal)
    if gradients is None:
        return chosen(positions > 1, first + (sends - 1) * np.maximum(0.0, keys - block), 0.0)
    gradients = gradients / (degree * sends)
    exposed = (
        first
        + (np.minimum(2, sends) - 1) * np.maximum(0.0, keys - block)
        + np.maximum(0, positions - 3) * np.maximum(0.0, keys + gradients - block)
        + (positions >= 3) * np.maximum(0.0, gradients + latency - block)
        + gradients
        + latency
    )
    return chosen(positions > 1, exposed, 0.0)


def parts_by_shares(lengths: Sequence[int], degree: int, shares: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return two arrays by position: its part of the piece's attention (0 to 1), and the tokens that it holds."""
    pairs, held = np.zeros(degree), np.zeros(degree)
    for length in lengths:
        for position in range(degree):
            for start, stop in position_chunks(length, degree, position, shares):
                pairs[position] += float(stop) ** 2 - float(start) ** 2
                held[position] += stop - start
    return pairs / sum(float(length) ** 2 for length in lengths), held
