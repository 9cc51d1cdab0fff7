"""The baseline: one fixed mesh of data-parallel groups x context-parallel ranks, today's long-context training.

It is sized for the longest sequence (exact, divisor or power of two); sequences are packed in data order, cut over all
ranks of a group and dealt in turn. The first size to end wins. docs/decisions/baselines-in-their-favour.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.held import held_at_most, held_tokens, rounding_tokens
from lengthwise.core.names import counted
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import ring_order


def plan_static(request: PlanRequest) -> list[Microbatch]:
    """Plan one step on the fixed mesh for `context_tokens`.

    Raises:
        PlanError: a context that the cluster cannot hold, or a sequence longer than the context.
    """
    context = _context_tokens(request)
    clusters = [request.cluster]
    while (held := clusters[-1].capacity_tokens) < request.most_held_tokens:
        clusters.append(replace(clusters[-1], capacity_tokens=min(2 * held, request.most_held_tokens)))
    holding = [cluster for cluster in clusters[:-1] if cluster.longest_tokens >= context]
    sizes = (cp for cluster in (*holding, clusters[-1]) for cp in context_parallel_degrees(cluster, context))
    held = request.cluster.capacity_tokens  # packs up to the context cost more launches, but are dealt more evenly
    rooms = {(cp, room): None for cp in sizes for room in (cp * held, min(cp * held, context))}
    best: tuple[float, list[Microbatch]] | None = None
    for cp, room in rooms:
        cost = request.cost
        least = cost.fixed_seconds + cost.piece_seconds([max(request.tokens)], cp)  # of the longest sequence's pack
        if best is None or least < best[0]:
            planned = _plan_on(request, cp, room)
            best = planned if best is None or planned[0] < best[0] else best
    assert best is not None, "no group size was tried"
    return best[1]


def context_parallel_degrees(cluster: Cluster, context_tokens: int) -> tuple[int, ...]:
    """List the group sizes that hold a context: exact, divisor, power of two; PlanError: none does."""
    exact = -(-context_tokens // cluster.capacity_tokens)
    if exact > cluster.ranks:
        held = f"{cluster.longest_tokens} tokens ({counted(cluster.ranks, 'rank')} x {cluster.capacity_tokens} tokens)"
        room = -(-context_tokens // cluster.ranks)
        raise PlanError(
            "context_tokens",
            expected=f"at most {held}",
            got=str(context_tokens),
            remedy=f"Use {exact} ranks, raise {{capacity_tokens}} to {room}, or take a shorter context.",
        )
    divisor = next(degree for degree in range(exact, cluster.ranks + 1) if cluster.ranks % degree == 0)
    power = 1 << (exact - 1).bit_length()
    return tuple(dict.fromkeys(degree for degree in (exact, divisor, power) if degree <= cluster.ranks))


def _plan_on(request: PlanRequest, cp: int, room_tokens: int) -> tuple[float, list[Microbatch]]:
    """Pack and deal on groups of `cp` ranks; return the makespan and the microbatches."""
    cluster, cost = request.cluster, request.cost
    packs = _pack_in_order(request.tokens, cp, cluster.capacity_tokens, room_tokens)
    groups = [ring_order(first, cp) for first in range(0, cluster.ranks - cp + 1, cp)]
    busy = [0.0] * len(groups)
    for number, pack in enumerate(packs):
        seconds = cost.piece_seconds([request.tokens[i] for i in pack], cp)
        busy[number % len(groups)] += cost.fixed_seconds + seconds
    return max(busy), [
        Microbatch(pieces=(Piece(ranks=groups[number % len(groups)], sequences=tuple(pack)),))
        for number, pack in enumerate(packs)
    ]


def _context_tokens(request: PlanRequest) -> int:
    longest = max(request.tokens)
    context = request.context_tokens
    if context is None:
        return longest
    if context < longest:
        raise PlanError(
            f"sequence {request.tokens.index(longest)}",
            expected=f"at most {{context_tokens}} = {context} tokens",
            got=f"{longest} tokens",
            remedy=f"Raise {{context_tokens}} to {longest}, or leave it out.",
        )
    return context


@lru_cache(maxsize=64)  # independent of costs, so called again for each of their choices
def _pack_in_order(tokens: tuple[int, ...], cp: int, capacity_tokens: int, room_tokens: int) -> list[list[int]]:
    """Put each sequence into the first pack with room, in data order; one above a group's capacity is alone.

    Room counts the tokens of each position; a cut sequence may leave one more than its share there.
    """
    packs: list[_Pack] = []
    room = np.full(len(tokens), room_tokens, dtype=np.int64)
    for i, length in enumerate(tokens):
        if length > cp * capacity_tokens:
            room[len(packs)] = 0
            packs.append(_Pack(cp, capacity_tokens))
            packs[-1].put(i, length)
            continue
        number = 0
        while True:
            number += int((room[number : len(packs) + 1] >= length).argmax())  # the last one is new and has room
            if number == len(packs):
                packs.append(_Pack(cp, capacity_tokens))
                assert packs[-1].has_room(length), f"sequence {i} of {length} tokens over {cp} x {capacity_tokens}"
            if packs[number].has_room(length):
                break
            number += 1
        packs[number].put(i, length)
        room[number] -= length
    return [pack.sequences for pack in packs]


class _Pack:
    """A pack over `cp` positions; tokens per position are counted only when a bound does not decide."""

    def __init__(self, cp: int, capacity_tokens: int) -> None:
        self.sequences: list[int] = []
        self._cp, self._capacity_tokens = cp, capacity_tokens
        self._held = np.zeros(cp, dtype=np.int64)
        self._uncounted: list[int] = []  # lengths that are not yet in `_held`
        self._most = 0  # no position holds more

    def has_room(self, length: int) -> bool:
        most = self._capacity_tokens + rounding_tokens(len(self.sequences) + 1, self._cp)
        if self._most + held_at_most(length, self._cp) <= most:
            return True
        self._held += held_tokens(self._uncounted, self._cp)
        self._uncounted.clear()
        self._most = int(self._held.max())
        return int((self._held + held_tokens([length], self._cp)).max()) <= most

    def put(self, sequence: int, length: int) -> None:
        self.sequences.append(sequence)
        self._uncounted.append(length)
        self._most += held_at_most(length, self._cp)
