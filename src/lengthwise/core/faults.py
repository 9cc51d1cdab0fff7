"""The hook for faults of tests. `testing/faults.py` has the points and what can happen there."""

from __future__ import annotations

import os
from importlib import import_module


def fault(point: str, rank: int, step: int) -> None:
    """Let a fault of `LENGTHWISE_FAULT` happen at this point; with it the repository's root is on Python's path."""
    if os.environ.get("LENGTHWISE_FAULT"):
        import_module("testing.faults").happen(point, rank, step)
