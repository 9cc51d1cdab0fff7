"""The choices of a finished plan, whoever made it: offload ratios, and the split of heads.

Planners decide degrees, at prices of the best choices (`Cost.choosing`); these two passes write the choices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf

from lengthwise.core.held import held_by_rank
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import Choice, Cost
from lengthwise.program.ring_order import ring_order

_DIGITS = 6  # of an offload ratio; rounded up


def write_offload(plan: Plan) -> Plan:
    """Return the plan with the ratio that each microbatch needs; the ratios that it had are not looked at."""
    microbatches = tuple(
        replace(microbatch, offload=_needed_ratio(plan, microbatch)) for microbatch in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


def _needed_ratio(plan: Plan, microbatch: Microbatch) -> float:
    """Find the least o with held x `kept_ratio(o, L)` <= capacity + tokens allowed for rounding, on every rank."""
    if len(microbatch.pieces) == 1:
        only = microbatch.pieces[0]
        if sum(plan.tokens[i] for i in only.sequences) <= plan.capacity:
            return 0.0
    held, rounding = held_by_rank(plan, microbatch)
    kept = min(1.0, *((plan.capacity + rounding[rank]) / tokens for rank, tokens in held.items() if tokens))
    if kept == 1.0:
        return 0.0
    ratio = (1 - kept) * plan.layers / max(plan.layers - 2, 1)
    assert ratio <= 1 + 1e-12, f"{held.most_common(1)} tokens on a rank, with all offloaded ratio {ratio}"
    return min(1.0, math.ceil(ratio * 10**_DIGITS) / 10**_DIGITS)


def split_heads(plan: Plan, cost: Cost, asked: str | int = "auto") -> Plan:
    """Return the plan with the quickest split of heads for each of its rings, or in groups of `asked` where it can."""
    microbatches = tuple(
        replace(microbatch, pieces=tuple(_quickest(plan, microbatch, each, cost, asked) for each in microbatch.pieces))
        for microbatch in plan.microbatches
    )
    if all(piece.heads == 1 for microbatch in microbatches for piece in microbatch.pieces):
        return plan
    requires = plan.requires if "heads" in plan.requires else (*plan.requires, "heads")
    return replace(plan, microbatches=microbatches, requires=requires)


def _quickest(plan: Plan, microbatch: Microbatch, piece: Piece, cost: Cost, asked: str | int) -> Piece:
    if piece.degree == 1 or piece.shares is not None:
        return piece
    lengths = [plan.tokens[i] for i in piece.sequences]
    first = min(piece.ranks)
    is_interval = piece.ranks == ring_order(first, piece.degree)
    best, least = piece, inf
    for heads in range(1, min(cost.heads, piece.degree) + 1) if asked == "auto" else (int(asked),):
        if cost.heads % heads or piece.degree % heads:
            continue
        ranks = ring_order(first, piece.degree, heads) if is_interval else piece.ranks
        split = replace(piece, heads=heads, ranks=ranks)
        choice = Choice(heads=heads, offload=microbatch.offload, recompute=microbatch.recompute)
        seconds = cost.piece_seconds(lengths, split.degree, choice, ranks=split.ranks)
        if seconds < least:
            best, least = split, seconds
    return best
