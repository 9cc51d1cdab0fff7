"""Blocks of attention: how many pairs of tokens they see, and the speed of a kernel by their size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost.links import Floats

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
        seen = seen - share * np.maximum(0.0, tokens - window) ** 2  # s^2 - (2 s w - w^2)
    if not trees:
        return [(seen, tokens)]
    is_tree, (own, own_block, shared, block, *_) = of_trees(tokens, trees)
    inside = np.where(is_tree, own, seen), np.where(is_tree, own_block, tokens)
    return [inside, (np.where(is_tree, shared, 0.0), block)]


def of_trees(tokens: Floats, trees: Sequence[tuple[float, ...]]) -> tuple[NDArray[np.bool_], Floats]:
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
