"""How the rings of a plan exchange keys: each by the split of heads that takes least where its ranks are.

A pass over a finished plan of any planner, so that all are compared with the same exchange: pieces, ranks and order
stay, only `heads` is chosen, among the divisors of the ring's ranks and of the model's heads. Splitting heads over u
ranks divides what goes round the ring by u and pays an all-to-all, which is cheap inside a node. The engine does not
run such plans yet; it refuses them by name.
"""

from __future__ import annotations

from dataclasses import replace

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import AllTermsCost


def split_heads(plan: Plan, cost: AllTermsCost) -> Plan:
    """Return the plan with the quickest split of heads for each of its rings; plans without rings as they are."""
    microbatches = tuple(
        replace(microbatch, pieces=tuple(_quickest(plan, microbatch, piece, cost) for piece in microbatch.pieces))
        for microbatch in plan.microbatches
    )
    if all(piece.heads == 1 for microbatch in microbatches for piece in microbatch.pieces):
        return plan
    requires = plan.requires if "heads" in plan.requires else (*plan.requires, "heads")
    return replace(plan, microbatches=microbatches, requires=requires)


def _quickest(plan: Plan, microbatch: Microbatch, piece: Piece, cost: AllTermsCost) -> Piece:
    if piece.degree == 1 or piece.shares is not None:
        return piece
    lengths = [plan.tokens[i] for i in piece.sequences]
    seconds = {
        heads: cost.piece_seconds(
            lengths,
            piece.degree,
            ranks=piece.ranks,
            heads=heads,
            offload=microbatch.offload,
            recompute=microbatch.recompute,
        )
        for heads in range(1, cost.heads + 1)
        if cost.heads % heads == 0 and piece.degree % heads == 0
    }
    return replace(piece, heads=min(seconds, key=lambda heads: (seconds[heads], heads)))
