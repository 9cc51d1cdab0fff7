"""Prefixes that sequences of a step have in common, which a plan may compute once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LEAST_SHARED_TOKENS = 16  # of a prefix: a block for fewer costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Sequences of a step, ordered so that those with a common prefix are neighbours.

    common[i]: number of first tokens that sequence order[i] shares with order[i - 1], less than the length of either; 0
    for the first sequence, and for fewer than `LEAST_SHARED_TOKENS`.
    """

    order: tuple[int, ...]
    common: tuple[int, ...]


def shared_prefixes(starts: Sequence[np.ndarray], lengths: Sequence[int]) -> SharedPrefixes | None:
    """Return the prefixes that sequences of these lengths share, or None if they share none.

    starts: first tokens of each sequence, of which a prefix may be made, (0 or more,) or (0 or more, bytes).
    """
    order = sorted(range(len(starts)), key=lambda number: (starts[number].tobytes(), -lengths[number], number))
    common = [0]
    for before, number in pairwise(order):
        same = min(len(starts[before]), len(starts[number]))
        if same:
            unequal = (starts[before][:same] != starts[number][:same]).reshape(same, -1).any(axis=1)
            same = int(unequal.argmax()) if unequal.any() else same
        common.append(same if same >= LEAST_SHARED_TOKENS else 0)
    return SharedPrefixes(order=tuple(order), common=tuple(common)) if any(common) else None
