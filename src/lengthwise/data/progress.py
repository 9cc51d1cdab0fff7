"""How far a preparation of data is, for those who show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a preparation is: shards, of which some were there, bytes of source files, tokens and rows so far."""

    shards_done: int
    shards_found: int
    num_shards: int
    bytes_done: int
    num_bytes: int
    rows: int
    tokens: int
