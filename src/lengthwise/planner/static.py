"""The baseline: one fixed mesh of data-parallel groups x context-parallel ranks for every step.

It stands for how long-context training is run today: the mesh is sized once, for the longest sequence (the context);
samples are packed in data order up to that context; each pack is cut over all ranks of a group, short samples
included; packs are dealt to the groups in turn. Attention stays inside each sample, as variable-length kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.core.cut import chunk_bounds
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.planner.request import PlanRequest
from lengthwise.planner.rings import ring_order


def plan_static(request: PlanRequest) -> list[Microbatch]:
    """Plan one step on the fixed mesh that `context_tokens` asks for.

    Raises:
        PlanError: a context that the cluster cannot hold, or a sequence longer than the context.
    """
    cluster = request.cluster
    context = _context_tokens(request)
    cp = context_parallel_ranks(cluster, context)
    packs = _pack_in_order(request.tokens, cp, cluster.capacity_tokens)
    groups = [ring_order(first, cp) for first in range(0, cluster.ranks, cp)]
    return [
        Microbatch(pieces=(Piece(ranks=groups[number % len(groups)], sequences=tuple(pack)),))
        for number, pack in enumerate(packs)
    ]


def context_parallel_ranks(cluster: Cluster, context_tokens: int) -> int:
    """Return the smallest divisor of the rank count that holds a context.

    Raises:
        PlanError: not even all ranks hold it.
    """
    for degree in range(1, cluster.ranks + 1):
        if cluster.ranks % degree == 0 and degree * cluster.capacity_tokens >= context_tokens:
            return degree
    raise PlanError(
        "context_tokens",
        expected=f"at most {cluster.longest_tokens} tokens ({cluster.ranks} ranks x {cluster.capacity_tokens} tokens)",
        got=str(context_tokens),
        remedy=f"Use {-(-context_tokens // cluster.capacity_tokens)} ranks or a shorter context.",
    )


def _context_tokens(request: PlanRequest) -> int:
    longest = max(request.tokens)
    context = request.context_tokens
    if context is None:
        return longest
    if context < longest:
        raise PlanError(
            f"sequence {request.tokens.index(longest)}",
            expected=f"at most context_tokens = {context} tokens",
            got=f"{longest} tokens",
            remedy=f"Raise context_tokens to {longest}, or leave it out.",
        )
    return context


def _pack_in_order(tokens: Sequence[int], cp: int, capacity_tokens: int) -> list[list[int]]:
    """Put each sequence into the first pack with room, in data order.

    Room is counted in the tokens that each position really holds: a cut sequence may leave one more than its share
    on a position, which the plan file allows once a sequence.
    """
    packs: list[list[int]] = []
    totals = np.zeros(len(tokens), dtype=np.int64)
    held = np.zeros((len(tokens) if cp > 1 else 0, cp), dtype=np.int64)
    for i, length in enumerate(tokens):
        share = _held_tokens(length, cp) if cp > 1 else None
        for pack in np.flatnonzero(totals[: len(packs) + 1] + length <= cp * capacity_tokens).tolist():
            if share is None or np.all(held[pack] + share <= capacity_tokens + _cut(packs, pack) + 1):
                break
        else:
            raise AssertionError(f"no pack for sequence {i} of {length} tokens over {cp} x {capacity_tokens}")
        if pack == len(packs):
            packs.append([])
        packs[pack].append(i)
        totals[pack] += length
        if share is not None:
            held[pack] += share
    return packs


def _cut(packs: Sequence[Sequence[int]], pack: int) -> int:
    return len(packs[pack]) if pack < len(packs) else 0


def _held_tokens(length: int, degree: int) -> np.ndarray:
    chunks = np.diff(np.array(chunk_bounds(length, degree), dtype=np.int64))
    return chunks[:degree] + chunks[: degree - 1 : -1]
