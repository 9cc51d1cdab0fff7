"""Parts of mapped files that will be read soon: the system begins to read them, and nobody waits."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


def read_ahead(values: np.ndarray) -> None:
    """Begin to read what `values`, a view of a mapped file, needs from the disk."""
    if not values.size or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = values.ctypes.data
    start = first - first % mmap.PAGESIZE
    # A hint: without it the first to read waits, so that what it returns does not matter.
    advise(ctypes.c_void_p(start), ctypes.c_size_t(first + values.nbytes - start), mmap.MADV_WILLNEED)


advise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_WILLNEED") else None
