"""The interface of stores for offloaded activations: `DiskStore` and `PinnedStore`."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from math import inf
from typing import Any, Protocol

from torch import Tensor


class Stored(Protocol):
    """Bytes in a store."""

    def fetch(self) -> None:
        """Begin to load the bytes while the caller computes; further calls do nothing."""
        ...

    def take(self) -> Tensor:
        """Wait for the bytes and return them, uint8 (bytes,), on their device; MemoryShortage: they were not stored."""
        ...


class ActivationStore(Protocol):
    """Holds a rank's activations until backward, for one thread; at most `leaving_bytes` are still on the device."""

    leaving_bytes: int

    @property
    def waited_seconds(self) -> float:
        """Seconds that the caller, or its stream, has waited for copies."""
        ...

    def put(self, values: Tensor) -> Stored:
        """Begin to store `values`, uint8 (bytes,), which must not be written again; MemoryShortage: no room."""
        ...

    def free(self, stored: Iterable[Any]) -> None:
        """Free the space of these entries, whose microbatch is over."""
        ...

    def close(self) -> None:
        """Release the store."""
        ...


class StoreRoom:
    """The space of a store, of any size, allocated first fit.

    A pipeline stage stores several microbatches at once, which end in another order than they began. A microbatch is
    freed as a whole, so gaps are few.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._gaps: list[tuple[float, float]] = [(0, inf)]  # (start, stop), ascending; never adjacent

    @property
    def end(self) -> int:
        """End of the last allocation."""
        return int(self._gaps[-1][0])

    def take(self, size: int) -> int:
        """Allocate `size` bytes and return their start."""
        needed = self._aligned(size)
        number = next(i for i, (start, stop) in enumerate(self._gaps) if stop - start >= needed)
        start, stop = self._gaps[number]
        self._gaps[number : number + 1] = [(start + needed, stop)] if stop - start > needed else []
        return int(start)

    def give(self, start: int, size: int) -> None:
        """Free an allocation."""
        first, last = start, start + self._aligned(size)
        after = bisect.bisect(self._gaps, (first, inf))
        before = after
        if before and self._gaps[before - 1][1] == first:
            before, first = before - 1, self._gaps[before - 1][0]
        if self._gaps[after][0] == last:
            after, last = after + 1, self._gaps[after][1]
        self._gaps[before:after] = [(first, last)]

    def _aligned(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment
