"""Tokens that each rank of a microbatch holds, and the limit that the plan file sets.

The rule of `core.cut` for whole pieces: `held_tokens` counts each position, `held_at_most` bounds them, `held_by_rank`
counts each rank of a microbatch. A rank may hold the capacity plus `rounding_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import local_tokens
from lengthwise.core.plan import Microbatch, Plan

ROUNDING_TOKENS = 1  # added to the limit of a microbatch's ranks by each cut sequence
_EXACT = 2**62  # largest product that fits int64

Tokens = TypeVar("Tokens", int, NDArray[np.int64])


def held_tokens(lengths: Iterable[int], degree: int, shares: tuple[float, ...] | None = None) -> NDArray[np.int64]:
    """Count the tokens that each of `degree` positions holds of sequences of these lengths, (degree,)."""
    held = np.zeros(degree, dtype=np.int64)
    if degree == 1:
        held[0] = sum(lengths)
        return held
    borders = np.arange(2 * degree + 1, dtype=np.int64)
    for length in lengths:
        if shares is None and length <= _EXACT // (2 * degree):
            chunks = np.diff(length * borders // (2 * degree))
            held += chunks[:degree] + chunks[: degree - 1 : -1]
        else:
            held += np.array([local_tokens([length], degree, j, shares) for j in range(degree)], dtype=np.int64)
    return held


def held_at_most(length: Tokens, degree: int) -> Tokens:
    """Return an upper bound of the tokens that a position holds of an evenly cut sequence: two rounded-up chunks."""
    return length if degree == 1 else 2 * -(-length // (2 * degree))


def rounding_tokens(sequences: int, degree: int) -> int:
    """Return how many tokens beyond the capacity each rank of a piece with these sequences may hold."""
    return ROUNDING_TOKENS * sequences if degree > 1 else 0


def held_by_rank(plan: Plan, microbatch: Microbatch) -> tuple[Counter[int], Counter[int]]:
    """Return, by rank of a microbatch, the tokens it holds, and the tokens it may hold above the capacity."""
    held, rounding = Counter[int](), Counter[int]()
    for piece in microbatch.pieces:
        lengths = [plan.tokens[i] for i in piece.sequences]
        if piece.degree == 1:
            held[piece.ranks[0]] += sum(lengths)
            continue
        held_here = held_tokens(lengths, piece.degree, piece.shares)
        more = rounding_tokens(len(piece.sequences), piece.degree)
        for rank, tokens in zip(piece.ranks, held_here.tolist(), strict=True):
            held[rank] += tokens
            rounding[rank] += more
    return held, rounding


def fullest_tokens(plan: Plan, microbatch: Microbatch) -> int:
    """Return the most tokens that any rank of a microbatch holds."""
    return max(held_by_rank(plan, microbatch)[0].values())


def kept_ratio(offload: float, layers: float) -> float:
    """Return the share of a token's activations that stays on the device; first and last layer are not offloaded."""
    layers = max(layers, 2)
    return (2 + (1 - offload) * (layers - 2)) / layers


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits; all below it fit, and 0 always does."""
    low, high = 0, max(0, most)
    while low < high:
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
