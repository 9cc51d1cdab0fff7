"""A baseline: ByteScale's Algorithm 1, hybrid data parallelism without a balance scheduler (arXiv 2502.21231, 5.3).

It stands for what dynamic groups gain by themselves: no communication that memory does not ask for, and no look at
what anything costs.

1. A sequence longer than the capacity C is cut over the fewest ranks that hold it, D(s).
2. Shorter ones are packed to fill C: one pack after the other takes the longest that still fits.
3. Pieces are dealt in order, long sequences as they come in the data, then packs. Every rank has one slot in every
   round; a piece of d ranks takes the next d slots of the first round that has them. So ranks hold about equal tokens,
   which is all that Algorithm 1 asks, and unequal work.

Where it differs from the paper, and why that is fair:
- D(s) is Equation 3 where costs offer offload (`--offload auto`): the fewest ranks whose device holds s with a ratio
  that compute hides. Without, it is ceil(s / C), that equation at ratio 0. `plan_step` keeps the better of both.
- Line 10 ("assign sequences to ranks") leaves the order open. Filling earlier rounds, instead of going on from the last
  rank, leaves no holes where rings do not fit side by side: a kind reading.
- Rings are intervals of the line of ranks, as for every planner here; dealt in order, they are so by themselves.
- Rounds set the order only: a rank goes on as soon as its partners are free, and nobody waits for a round to end.
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
