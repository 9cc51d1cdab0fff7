"""The baseline: one fixed mesh of data-parallel groups x context-parallel ranks for every step.

It stands for how long-context training is run today: the mesh is sized once, for the longest sequence (the context);
samples are packed in data order up to that context; each pack is cut over all ranks of a group, short samples
included; packs are dealt to the groups in turn. Attention stays inside each sample, as variable-length kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.planner.holding import held_tokens
from lengthwise.planner.request import PlanRequest
from lengthwise.planner.rings import ring_order


def plan_static(request: PlanRequest) -> list[Microbatch]:
    """Plan one step on the fixed mesh that `context_tokens` asks for.

    Raises:
        ConfigError: a context that is not a number of tokens.
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
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ConfigError(
            "context_tokens", expected="a whole number of at least 1", got=repr(context), remedy="Give it in tokens."
        )
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
    held: list[NDArray[np.int64]] = []
    room = np.full(len(tokens), cp * capacity_tokens, dtype=np.int64)
    for i, length in enumerate(tokens):
        share = held_tokens([length], cp)
        rounding = 1 if cp > 1 else 0
        for pack in np.flatnonzero(room[: len(packs) + 1] >= length).tolist():
            if pack == len(packs):
                packs.append([])
                held.append(np.zeros(cp, dtype=np.int64))
            most = capacity_tokens + rounding * (len(packs[pack]) + 1)
            if (held[pack] + share).max() <= most:
                packs[pack].append(i)
                held[pack] += share
                room[pack] -= length
                break
        else:
            raise AssertionError(f"no pack for sequence {i} of {length} tokens over {cp} x {capacity_tokens}")
    return packs
