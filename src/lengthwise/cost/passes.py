"""Passes over all layers: forward, forward again if activations are recomputed, backward.

Over d ranks in r = d / u positions of u ranks that split the heads, a pass takes a rank

    A + L + max(0, R - A) + h (r - 1) + X + S (d - 1)        seconds:

attention; linear work; keys and values, which hide behind A; latency of ring steps; all-to-all of split heads (Ulysses,
arXiv 2309.14509); rounds of a sweep of the states of all sequences, which hide behind nothing and are not repeated.
In pipelines and over shared uplinks R hides per ring step (docs/decisions/transfers-by-ring-step.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lengthwise.core.cut import position_chunks
from lengthwise.core.plan import RECOMPUTED
from lengthwise.cost.links import Floats, Numbers, chosen, larger, smaller


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
    again = RECOMPUTED[recompute]
    if again is None:
        return forward, backward
    second = replace(forward, states=0.0)
    if not again.attention:
        second = replace(second, attention=0.0, ring=0.0, exchange=0.0)
    if not again.products:
        second = replace(second, linear=ELEMENTWISE * forward.linear)
    return forward, second, backward


class Work(NamedTuple):
    """One rank's part of a piece in forward and backward together, in seconds; arrays have an entry per piece or rank.

    attention, linear, transfers: seconds of the whole piece (rank's share x degree). diagonal: attention of the first
    ring step.
    transfers: seconds of the ring's keys, values and gradients. exchange: all-to-all of groups that split heads.
    copy: seconds of copying offloaded activations, one direction; None without offload.
    latency: seconds of one ring step of one pass. positions: number of groups around the ring.
    """

    attention: Numbers
    diagonal: Numbers
    linear: Numbers
    transfers: Numbers
    exchange: Numbers
    states: Numbers
    copy: Numbers | None
    latency: Numbers
    positions: Numbers
    degree: Numbers


def passes_seconds(sweeps: Sequence[PassShares], work: Work, *, by_ring_step: bool) -> Numbers:
    """Return the seconds of all passes, forward first. by_ring_step: True if transfers hide per ring step."""
    attention = linear = exchanges = states = 0.0
    for sweep in sweeps:
        attention, linear = attention + sweep.attention, linear + sweep.linear
        exchanges, states = exchanges + sweep.exchange, states + sweep.states
    together: Numbers = attention * work.attention + linear * work.linear
    apart: Numbers = exchanges * work.exchange + states * work.states
    rings = [sweep for sweep in sweeps if sweep.ring]
    for sweep in rings:
        hides = sweep.attention * work.attention
        if by_ring_step:
            keys = sweeps[0].ring * work.transfers
            gradients = (sweep.ring - sweeps[0].ring) * work.transfers if sweep is sweeps[-1] else None
            apart = apart + _exposed_by_ring_step(work, sweep.attention, keys, gradients)
        else:
            together = together + larger(0.0, sweep.ring * work.transfers - hides)
    if not by_ring_step:
        apart = apart + len(rings) * work.latency * (work.positions - 1)
    if work.copy is not None:
        first, *others = (sweep.attention * work.attention + sweep.linear * work.linear for sweep in sweeps)
        out, back = (larger(0.0, work.copy - each / work.degree) for each in (first, sum(others)))
        apart = apart + out + back
    return together / work.degree + apart


def _exposed_by_ring_step(work: Work, share: float, keys: Numbers, gradients: Numbers | None) -> Numbers:
    """Sum the seconds of each ring step of a pass beyond the block beside it, as the simulator runs them.

    Keys hide under all blocks but the last; backward's gradients follow two ring steps later, and the last hide under
    nothing.
    """
    latency, positions = work.latency, work.positions
    sends = larger(positions - 1, 1)
    diagonal = share * work.diagonal / work.degree
    block = share * (work.attention - work.diagonal) / (work.degree * sends)
    keys = keys / (work.degree * sends) + latency
    first = larger(0.0, keys - diagonal)
    if gradients is None:
        return chosen(positions > 1, first + (sends - 1) * larger(0.0, keys - block), 0.0)
    gradients = gradients / (work.degree * sends)
    exposed = (
        first
        + (smaller(2, sends) - 1) * larger(0.0, keys - block)
        + larger(0, positions - 3) * larger(0.0, keys + gradients - block)
        + (positions >= 3) * larger(0.0, gradients + latency - block)
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
