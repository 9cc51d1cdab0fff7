"""Parts of mapped files that will be read soon: the system begins to read them, and nobody waits."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


def read_ahead(values: np.ndarray) -> None:
    """Begin to read what `values`, a view of a mapped file, needs from the disk; nothing where the system cannot."""
    if not values.size or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = values.ctypes.data
    start = first - first % mmap.PAGESIZE
    advise(start, first + values.nbytes - start)


def advise(start: int, num_bytes: int) -> None:
    """Ask the system for mapped pages; a hint, without which the first to read waits."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_WILLNEED)
