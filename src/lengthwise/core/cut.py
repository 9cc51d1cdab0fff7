"""How a sequence is cut over the ranks of a ring: 2d chunks, position j holding chunks j and 2d-1-j.

Under a causal mask the two chunks of every position see equally much between them, so equal chunks are equal work.
Chunks may be empty: no length is too short and no divisibility rule exists. Rule and rounding are those of the plan
file: chunk k ends at token floor(length x cumulative share), in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache


@lru_cache(maxsize=4096)
def chunk_bounds(length: int, degree: int, shares: tuple[float, ...] | None = None) -> tuple[int, ...]:
    """Return the 2 x degree + 1 borders of the chunks of a sequence of `length` tokens.

    `shares` holds one weight a position (default: all equal); each of a position's two chunks gets half its share.
    """
    if shares is None:
        return tuple(length * k // (2 * degree) for k in range(2 * degree + 1))
    weights = [Fraction(share) for share in shares]
    total, cumulative, bounds = 2 * sum(weights), Fraction(0), [0]
    for weight in [*weights, *reversed(weights)]:
        cumulative += weight
        bounds.append(int(length * cumulative / total))
    return tuple(bounds)


def position_chunks(
    length: int, degree: int, position: int, shares: tuple[float, ...] | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (start, stop) token ranges of the two chunks that `position` holds, lower one first."""
    bounds = chunk_bounds(length, degree, shares)
    high = 2 * degree - 1 - position
    return (bounds[position], bounds[position + 1]), (bounds[high], bounds[high + 1])


def local_tokens(lengths: Sequence[int], degree: int, position: int, shares: tuple[float, ...] | None = None) -> int:
    """Count the tokens that `position` holds of sequences cut over `degree` ranks."""
    return sum(stop - start for length in lengths for start, stop in position_chunks(length, degree, position, shares))
