"""Refuse, before a process starts, sequences that no plan on this cluster can hold."""

from __future__ import annotations

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import Dataset

_SHOWN = 5


def check_fits(dataset: Dataset, *, ranks: int, capacity_tokens: int) -> None:
    """Raise DataError for sequences of more than `ranks` times `capacity_tokens` tokens.

    The message names the longest five and what would hold them all.
    """
    limit = ranks * capacity_tokens
    too_long = np.flatnonzero(dataset.lengths > limit)
    if not len(too_long):
        return
    longest_first = too_long[np.argsort(-dataset.lengths[too_long], kind="stable")]
    shown = [f"{row} ({dataset.name(row)}, {dataset.lengths[row]} tokens)" for row in map(int, longest_first[:_SHOWN])]
    more = f" and {len(too_long) - _SHOWN} more" if len(too_long) > _SHOWN else ""
    longest = int(dataset.lengths[longest_first[0]])
    keys = sorted({dataset.source_key(int(row)) for row in too_long})
    raise DataError(
        ", ".join(keys),
        expected=f"sequences of at most {limit} tokens, {ranks} ranks x capacity_tokens {capacity_tokens}",
        got=f"{len(too_long)} longer: sequence {', '.join(shown)}{more}",
        remedy=f"Run on at least {-(-longest // capacity_tokens)} ranks, or set capacity_tokens: "
        f"{-(-longest // ranks)}, or leave them out with max_tokens: {limit} and too_long: skip.",
    )
