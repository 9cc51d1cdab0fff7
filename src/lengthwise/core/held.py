"""How many tokens of a piece each of its positions holds: the cutting rule of `core.cut`, for whole pieces at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import local_tokens
from lengthwise.core.plan import Microbatch, Plan

_EXACT = 2**62  # products up to here fit NumPy's whole numbers


def held_tokens(lengths: Iterable[int], degree: int, shares: tuple[float, ...] | None = None) -> NDArray[np.int64]:
    """Count the tokens that each of `degree` positions holds of sequences of these lengths."""
    held = np.zeros(degree, dtype=np.int64)
    borders = np.arange(2 * degree + 1, dtype=np.int64)
    for length in lengths:
        if shares is None and length <= _EXACT // (2 * degree):
            chunks = np.diff(length * borders // (2 * degree))
            held += chunks[:degree] + chunks[: degree - 1 : -1]
        else:
            held += np.array([local_tokens([length], degree, j, shares) for j in range(degree)], dtype=np.int64)
    return held


def held_by_rank(plan: Plan, microbatch: Microbatch) -> tuple[Counter[int], Counter[int]]:
    """Count, for each rank of a microbatch, the tokens that it holds and the cut sequences that it has a part in."""
    held, cut = Counter[int](), Counter[int]()
    for piece in microbatch.pieces:
        held_here = held_tokens([plan.tokens[i] for i in piece.sequences], piece.degree, piece.shares)
        for rank, tokens in zip(piece.ranks, held_here.tolist(), strict=True):
            held[rank] += tokens
            cut[rank] += len(piece.sequences) if piece.degree > 1 else 0
    return held, cut
