"""Parts of mapped files that will be read soon: the system begins to read them, and nobody waits."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np


def read_ahead(values: np.ndarray) -> None:
    """Begin to read what `values` is a view of, where that is a mapped file; anything else is in memory already."""
    owner = values
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not values.size or not isinstance(owner.base, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = values.ctypes.data - np.frombuffer(owner.base, dtype=np.uint8).ctypes.data
    first_page = first - first % mmap.PAGESIZE
    with contextlib.suppress(OSError):  # a hint: without it the first to read waits
        owner.base.madvise(mmap.MADV_WILLNEED, first_page, first + values.nbytes - first_page)
