"""The hook for faults of tests. `testing/faults.py` has the points and the faults."""

from __future__ import annotations

import os
from importlib import import_module


def fault(point: str, rank: int, step: int) -> None:
    """Cause the fault of `LENGTHWISE_FAULT` if it names this point; the repository's root must be on Python's path."""
    if os.environ.get("LENGTHWISE_FAULT"):
        import_module("testing.faults").happen(point, rank, step)
