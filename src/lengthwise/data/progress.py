"""How far a preparation of data is, for those who show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a preparation is: files of all, of which some were there from an earlier try."""

    files_done: int
    files_found: int
    num_files: int
