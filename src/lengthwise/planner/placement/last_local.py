"""A rank's last microbatch local where that costs nothing, so that its gradients can be reduced under it.

A collective may run under a microbatch only if no ring follows on its rank (docs/architecture.md, order rules). Packs
level the ends, so most ranks end with one anyway. A rank that ends with a ring and has a pack beside it, in the same
microbatch, or before it takes that pack last, where its end with one launch more is still within the makespan. Nobody
starts later for it: the pack is on that rank alone, and what came after it moves forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lengthwise.core.plan import Microbatch
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.score import rank_ends


def end_with_packs(request: PlanRequest, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """Move packs behind the last rings of their ranks where the step ends no later."""
    last_ring: dict[int, int] = {}
    packs: dict[int, list[int]] = {}  # of each rank, the microbatches that have one
    for number, microbatch in enumerate(microbatches):
        for piece in microbatch.pieces:
            if piece.degree == 1:
                packs.setdefault(piece.ranks[0], []).append(number)
            else:
                last_ring.update(dict.fromkeys(piece.ranks, number))
    wanted = [rank for rank in sorted(packs) if packs[rank][-1] <= last_ring.get(rank, -1)]
    if not wanted:
        return list(microbatches)
    ends = rank_ends(request.draft(microbatches), request.cost, request.speeds)
    makespan, moved = max(ends), dict[int, int]()
    for rank in wanted:
        speed = 1.0 if request.speeds is None else request.speeds[rank]
        later = []
        for number in packs[rank]:
            seconds = 0.0 if number == last_ring[rank] else _pack_seconds(request, microbatches[number], rank)
            later.append(((request.cost.fixed_seconds + seconds) / speed, number))
        if ends[rank] + min(later)[0] <= makespan:
            moved[rank] = min(later)[1]
    kept = [
        replace(
            microbatch,
            pieces=tuple(p for p in microbatch.pieces if p.degree > 1 or moved.get(p.ranks[0]) != number),
        )
        for number, microbatch in enumerate(microbatches)
    ]
    last = [
        replace(microbatches[number], pieces=tuple(p for p in microbatches[number].pieces if p.ranks == (rank,)))
        for rank, number in moved.items()
    ]
    return [microbatch for microbatch in kept if microbatch.pieces] + last


def _pack_seconds(request: PlanRequest, microbatch: Microbatch, rank: int) -> float:
    inside = [i for piece in microbatch.pieces if piece.ranks == (rank,) for i in piece.sequences]
    return float(np.sum(request.cost.compute_seconds(request.lengths[inside])))
