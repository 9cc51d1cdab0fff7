"""What a session asks of whoever updates the parameters: a loop's own optimizer on slices, or one by a run file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from lengthwise.engine.parameters import Parameters


class Updates(Protocol):
    """Updates this rank's slices of `parameters`."""

    parameters: Parameters

    def collecting(self) -> AbstractContextManager[None]:
        """Add the gradients of backwards inside the block to those that were not cleared."""
        ...

    def zero_grad(self) -> None:
        """Clear all gradients of this rank."""
        ...

    def pending_bytes(self) -> tuple[int, int]:
        """Count the bytes of states that are yet to be made, and those that a step's end needs for a while."""
        ...
