"""Digests of rows and of data: equal where what is trained on is equal, wherever the rows lie.

A row's digest is 16 bytes of BLAKE2b over its ids, over its labels where they are not the ids, and over its weights
where some are neither 0 nor 1; one that is left out has zeros. The digest of data is SHA-256 over those of all rows in
order. A token takes 8 ns, 20 with labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ROW_DIGEST_BYTES = 16
ROWS_AT_ONCE = 1 << 18  # of what is gone through row by row
_LABELS, _WEIGHTS = b"labels", b"weights"  # six and seven bytes: no whole number of tokens


def row_digest(tokens: np.ndarray, labels: np.ndarray | None, weights: np.ndarray | None = None) -> bytes:
    """Return the digest of one row, 16 bytes; int32 [length] each, labels None: the ids.

    weights: float32 [length]; None: 0 or 1, as the labels say.
    """
    if not len(tokens):
        return bytes(ROW_DIGEST_BYTES)
    found = hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").data, digest_size=ROW_DIGEST_BYTES)
    if labels is not None and not np.array_equal(labels, tokens):
        found.update(_LABELS)
        found.update(np.ascontiguousarray(labels, dtype="<i4").data)
    if weights is not None and not np.all((weights == 0) | (weights == 1)):
        found.update(_WEIGHTS)
        found.update(np.ascontiguousarray(weights, dtype="<f4").data)
    return found.digest()


def digest_of_rows(parts: Iterable[np.ndarray]) -> bytes:
    """Return the digest of data, 32 bytes, from those of its rows, uint8 [rows, 16] each."""
    found = hashlib.sha256()
    for part in parts:
        found.update(np.ascontiguousarray(part).data)
    return found.digest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; OSError where it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
