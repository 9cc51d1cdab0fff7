"""The interface between what is offloaded and where it goes: `DiskStore`, `PinnedStore`, and stores of tests."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stored(Protocol):
    """Bytes that a store holds."""

    def fetch(self) -> None:
        """Begin to bring them back, while the caller computes; once is enough."""
        ...

    def take(self) -> Tensor:
        """Return them, uint8 (bytes,) on the device they came from, waiting for them where that needs it.

        Raises:
            MemoryShortage: they could not be stored.
        """
        ...


class ActivationStore(Protocol):
    """Where activations are until backward; of one rank, used by one thread.

    leaving_bytes: of what was put, how many are on the device still at most (one entry may be larger).
    """

    leaving_bytes: int

    @property
    def waited_seconds(self) -> float:
        """Seconds that the caller, or its stream, waited for copies so far."""
        ...

    def put(self, values: Tensor) -> Stored:
        """Begin to store `values`, uint8 (bytes,), which nobody writes to any more.

        Raises:
            MemoryShortage: there is no room; says how many bytes were needed and left.
        """
        ...

    def reset(self) -> None:
        """Forget all that was put: the microbatch is over."""
        ...

    def close(self) -> None:
        """Give the room back."""
        ...
