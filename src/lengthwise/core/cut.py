"""How a sequence is cut over the ranks of a ring: 2d chunks, position j holding chunks j and 2d-1-j.

Under a causal mask every position then sees equally much. Chunks may be empty. Chunk k ends at token
floor(length x cumulative share), in exact arithmetic, as in the plan file.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache


@lru_cache(maxsize=4096)
def chunk_bounds(length: int, degree: int, shares: tuple[float, ...] | None = None) -> tuple[int, ...]:
    """Return the 2 x degree + 1 borders of the chunks. shares: one weight per position, half for each chunk."""
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
