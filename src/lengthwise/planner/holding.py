"""How many tokens of a piece each of its positions holds: the cutting rule of `core.cut`, for whole pieces at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import local_tokens

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
