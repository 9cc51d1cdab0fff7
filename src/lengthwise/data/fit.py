"""Refuse, before a process starts, sequences that no plan on this cluster, or the model itself, can hold."""

from __future__ import annotations

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import Dataset

_SHOWN = 5


def check_fits(dataset: Dataset, *, ranks: int, capacity_tokens: int) -> None:
    """Raise DataError for sequences of more than `ranks` times `capacity_tokens` tokens.

    The message names the longest five and what would hold them all.
    """
    limit, longest = ranks * capacity_tokens, int(dataset.lengths.max(initial=0))
    _refuse_longer(
        dataset,
        limit,
        f"{ranks} ranks x capacity_tokens {capacity_tokens}",
        f"Run on at least {-(-longest // capacity_tokens)} ranks, or set capacity_tokens: {-(-longest // ranks)}, or",
    )


def check_positions(dataset: Dataset, *, positions: int) -> None:
    """Raise DataError for sequences with more tokens than the model has positions."""
    why = "the model's max_position_embeddings (it looks positions up in a table)"
    _refuse_longer(dataset, positions, why, "Use a model with more positions, or")


def _refuse_longer(dataset: Dataset, limit: int, why: str, instead: str) -> None:
    too_long = np.flatnonzero(dataset.lengths > limit)
    if not len(too_long):
        return
    longest_first = too_long[np.argsort(-dataset.lengths[too_long], kind="stable")]
    shown = [f"{row} ({dataset.name(row)}, {dataset.lengths[row]} tokens)" for row in map(int, longest_first[:_SHOWN])]
    more = f" and {len(too_long) - _SHOWN} more" if len(too_long) > _SHOWN else ""
    raise DataError(
        ", ".join(sorted({dataset.source_key(int(row)) for row in too_long})),
        expected=f"sequences of at most {limit} tokens, {why}",
        got=f"{len(too_long)} longer: sequence {', '.join(shown)}{more}",
        remedy=f"{instead} leave them out with max_tokens: {limit} and too_long: skip.",
    )
