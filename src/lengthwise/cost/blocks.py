"""What sequences compute: pairs of tokens in blocks of attention, a kernel's speed by their size, and images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost.links import Floats, Numbers

Curve = tuple[tuple[float, float], ...]
"""(tokens of a block, share of attention's speed), ascending."""


def seen_blocks(
    tokens: Floats, windows: Sequence[tuple[int, float]], trees: Sequence[tuple[float, ...]]
) -> list[tuple[Floats, Floats]]:
    """Return (squared tokens, tokens of a block) inside of sequences and, if some are trees, between theirs.

    windows, trees: as in `Cost`.
    """
    seen = tokens * tokens
    for window, share in windows:
        before = np.maximum(0.0, tokens - window)
        seen = seen - share * (before * before)  # s^2 - (2 s w - w^2)
    if not trees:
        return [(seen, tokens)]
    is_tree, (own, own_block, shared, block, *_) = _of_trees(tokens, trees)
    inside = np.where(is_tree, own, seen), np.where(is_tree, own_block, tokens)
    return [inside, (np.where(is_tree, shared, 0.0), block)]


def image_work(tokens: Floats, degree: Numbers, trees: Sequence[tuple[float, ...]]) -> Floats:
    """Return the work on the images of sequence i, all `degree` ranks together, in tokens of linear work.

    A rank does all work on each image of which it holds a token. It has two chunks, and so up to four ends of them,
    each within an image: two images more than its part, on average.
    """
    is_tree, (*_, total, largest) = _of_trees(tokens, trees)
    return np.where(is_tree, np.minimum(degree * total, total + 2 * degree * largest), 0.0)


def _of_trees(tokens: Floats, trees: Sequence[tuple[float, ...]]) -> tuple[NDArray[np.bool_], Floats]:
    """Return which lengths are those of trees, and the columns of `Cost.trees` after the lengths, at each."""
    lengths, *columns = np.array(trees).T
    place = np.minimum(np.searchsorted(lengths, tokens), len(lengths) - 1)
    return lengths[place] == tokens, np.array(columns)[:, place]


def speed_shares(curve: Curve, tokens: Floats) -> Floats:
    """Return the share of attention's speed of blocks of so many tokens, by a curve of `Hardware`."""
    points, shares = _columns(curve)
    return np.interp(tokens, points, shares) * np.minimum(1.0, tokens / points[0])


@lru_cache(maxsize=64)
def _columns(curve: Curve) -> tuple[Floats, Floats]:
    """Return the tokens and shares of a curve as arrays, which all callers share."""
    tokens, shares = np.array(curve, dtype=np.float64).T
    return np.ascontiguousarray(tokens), np.ascontiguousarray(shares)
