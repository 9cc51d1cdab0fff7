"""A baseline: ByteScale's hybrid data parallelism without a balance scheduler: what dynamic groups gain by themselves.

1. A sequence longer than the capacity is cut over the fewest ranks that hold it, offload that compute hides counted;
   shorter ones are packed, each time the longest that still fits.
2. Long sequences in data order, then packs, are dealt in rounds: a piece of d ranks takes the next d places of the
   first round that has them.

Costs pieces x rounds. Source: arXiv 2502.21231, section 5.3, Algorithm 1;
docs/decisions/baselines-in-their-favour.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.core.plan import Microbatch
from lengthwise.planner.placement.short_sequences import full_packs
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import interval_microbatch


def plan_bytescale_naive(request: PlanRequest) -> list[Microbatch]:
    """Plan one step with the fewest ranks a sequence, dealt in order."""
    capacity = request.cluster.capacity_tokens
    tokens, degrees = request.tokens, request.hidden_degrees.tolist()
    short = sorted((i for i, length in enumerate(tokens) if length <= capacity), key=lambda i: (tokens[i], -i))
    pieces = [(degree, [i]) for i, degree in enumerate(degrees) if tokens[i] > capacity]
    pieces += [(1, pack) for pack in full_packs(short, [tokens[i] for i in short], capacity)]
    slots = deal_in_rounds([degree for degree, _ in pieces], request.cluster.ranks)
    order = sorted(range(len(pieces)), key=lambda place: slots[place])
    return [interval_microbatch(slots[place][1], *pieces[place]) for place in order]


def deal_in_rounds(degrees: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """Give each piece, in order, the next free slots of the first round that has as many as it needs.

    Returns for each piece its round and its first rank. Slots of a round are taken from rank 0 upward.
    """
    taken = np.zeros(len(degrees), dtype=np.int64)
    num_rounds = 0
    slots: list[tuple[int, int]] = []
    for degree in degrees:
        number = int(np.argmax(taken[: num_rounds + 1] + degree <= ranks))
        slots.append((number, int(taken[number])))
        taken[number] += degree
        num_rounds = max(num_rounds, number + 1)
    return slots
