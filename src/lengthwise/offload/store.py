"""The interface between what is offloaded and where it goes: `DiskStore` and `PinnedStore`."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from math import inf
from typing import Any, Protocol

from torch import Tensor


class Stored(Protocol):
    """Bytes that a store holds."""

    def fetch(self) -> None:
        """Begin to bring them back, while the caller computes; once is enough."""
        ...

    def take(self) -> Tensor:
        """Return uint8 (bytes,) on the device they came from, after a wait.

        MemoryShortage: they could not be stored.
        """
        ...


class ActivationStore(Protocol):
    """Where a rank's activations are until backward, for one thread; `leaving_bytes`: still on the device at most."""

    leaving_bytes: int

    @property
    def waited_seconds(self) -> float:
        """Seconds that the caller, or its stream, waited for copies so far."""
        ...

    def put(self, values: Tensor) -> Stored:
        """Begin to store `values`, uint8 (bytes,), which nobody writes any more; MemoryShortage: no room."""
        ...

    def free(self, stored: Iterable[Any]) -> None:
        """Give back the room of these, which backward is done with: their microbatch is over."""
        ...

    def close(self) -> None:
        """Give the room back."""
        ...


class Places:
    """The room of a store, of any size: each place is the first gap that is large enough.

    Several microbatches of a pipeline stage are stored at once and end in another order than they began. A microbatch
    is freed whole, so gaps are few.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._gaps: list[tuple[float, float]] = [(0, inf)]  # (start, stop), ascending; never adjacent

    @property
    def end(self) -> int:
        """Where the last place that is taken ends."""
        return int(self._gaps[-1][0])

    def take(self, size: int) -> int:
        """Return the start of a place for `size` bytes."""
        needed = self._aligned(size)
        number = next(i for i, (start, stop) in enumerate(self._gaps) if stop - start >= needed)
        start, stop = self._gaps[number]
        self._gaps[number : number + 1] = [(start + needed, stop)] if stop - start > needed else []
        return int(start)

    def give(self, start: int, size: int) -> None:
        """Give a place back."""
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
