"""The interface between what is offloaded and where it goes: `DiskStore`, `PinnedStore`, and one to measure with."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
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

    def reset(self) -> None:
        """Forget all that was put: the microbatch is over."""
        ...

    def close(self) -> None:
        """Give the room back."""
        ...


class CopyStore:
    """Copies in host memory, made at once and no tensors: to measure what offload takes away, not to gain by it."""

    waited_seconds = 0.0

    def __init__(self) -> None:
        self.leaving_bytes = 0

    def put(self, values: Tensor) -> _Copy:
        """Copy `values` (see `ActivationStore.put`)."""
        return _Copy(values)

    def reset(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Nothing is kept here."""


class _Copy:
    """Bytes of a `CopyStore`."""

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
