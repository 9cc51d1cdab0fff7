"""How the rings of a plan exchange keys: each by the split of heads that takes least where its ranks are.

A pass over a finished plan of any planner, so that all are compared with the same exchange: pieces, their ranks and the
order of microbatches stay, only `heads` is chosen, among the divisors of the ring's ranks and of the model's heads; a
ring over an interval then visits it group by group. Splitting heads over u ranks divides what goes round the ring by u
and pays an all-to-all, which is cheap inside a node. The engine does not run such plans yet; it refuses them by name.
`lengthwise` chooses degrees with this pass in mind (`cost.Choices`).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import Choice, Cost
from lengthwise.program.ring_order import ring_order


def split_heads(plan: Plan, cost: Cost) -> Plan:
    """Return the plan with the quickest split of heads for each of its rings; plans without rings as they are."""
    microbatches = tuple(
        replace(microbatch, pieces=tuple(_quickest(plan, microbatch, piece, cost) for piece in microbatch.pieces))
        for microbatch in plan.microbatches
    )
    if all(piece.heads == 1 for microbatch in microbatches for piece in microbatch.pieces):
        return plan
    requires = plan.requires if "heads" in plan.requires else (*plan.requires, "heads")
    return replace(plan, microbatches=microbatches, requires=requires)


def _quickest(plan: Plan, microbatch: Microbatch, piece: Piece, cost: Cost) -> Piece:
    if piece.degree == 1 or piece.shares is not None:
        return piece
    lengths = [plan.tokens[i] for i in piece.sequences]
    first = min(piece.ranks)
    is_interval = piece.ranks == ring_order(first, piece.degree)
    best, least = piece, inf
    for heads in range(1, min(cost.heads, piece.degree) + 1):
        if cost.heads % heads or piece.degree % heads:
            continue
        split = replace(
            piece, heads=heads, ranks=ring_order(first, piece.degree, heads) if is_interval else piece.ranks
        )
        choice = Choice(heads=heads, offload=microbatch.offload, recompute=microbatch.recompute)
        seconds = cost.piece_seconds(lengths, split.degree, choice, ranks=split.ranks)
        if seconds < least:
            best, least = split, seconds
    return best
