"""The interface between offload and the stores: `DiskStore`, `PinnedStore`, and `CopyStore` for measuring."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Stored(Protocol):
    """Bytes in a store."""

    def fetch(self) -> None:
        """Begin to load the bytes while the caller computes; further calls do nothing."""
        ...

    def take(self) -> Tensor:
        """Wait for the bytes and return them, uint8 (bytes,), on their original device.

        Raises:
            MemoryShortage: they could not be stored.
        """
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
        """The end of the last allocation."""
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


class CopyStore:
    """Copies in host memory, made at once and not as tensors, to measure what offload frees on the device."""

    waited_seconds = 0.0

    def __init__(self) -> None:
        self.leaving_bytes = 0

    def put(self, values: Tensor) -> _Copy:
        """Copy `values` (see `ActivationStore.put`)."""
        return _Copy(values)

    def free(self, stored: Iterable[Stored]) -> None:
        """Do nothing: copies end with their entries."""

    def close(self) -> None:
        """Do nothing."""


class _Copy:
    def __init__(self, values: Tensor) -> None:
        self._bytes, self._device = values.cpu().numpy().tobytes(), values.device
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            fetched = torch.empty(len(self._bytes), dtype=torch.uint8)
            fetched.numpy()[:] = np.frombuffer(self._bytes, dtype=np.uint8)
            self._fetched = fetched.to(self._device)

    def take(self) -> Tensor:
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None, "it was fetched"
        return fetched
