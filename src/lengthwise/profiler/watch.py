"""A stopwatch over a rank, and a transport that tells it when backward began.

By the clock "cpu" a rank's seconds are those in which its process computed, and the least that any rank waited for
messages in any turn: on a machine that does other work at the same time these are the ones that repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lengthwise.comm import Pending, Transport
from lengthwise.comm.transport import Around, Message
from lengthwise.core.measurements import Clock

Result = TypeVar("Result")


class Stopwatch:
    """Seconds of a rank by one of two clocks; on a GPU what was launched is waited for."""

    def __init__(self, clock: Clock, transport: Transport, device: torch.device) -> None:
        self._clock, self._transport, self._device = clock, transport, device

    def now(self) -> float:
        """Return seconds from some start."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._clock == "wall":
            return time.perf_counter()
        return time.process_time() + self._transport.clock.waited_seconds

    @property
    def waited(self) -> float:
        """Seconds spent waiting for messages since some start."""
        return self._transport.clock.waited_seconds

    def seconds(self, run: Callable[[], object]) -> float:
        """Return how long `run` takes, waiting for messages included."""
        return self.timed(run)[0]

    def timed(self, run: Callable[[], Result]) -> tuple[float, Result]:
        """Return how long `run` takes, waiting for messages included, and what it returned."""
        start = self.now()
        result = run()
        return self.now() - start, result


class WatchedTransport(Around):
    """A transport around another that notes when backward begins."""

    def __init__(self, inner: Transport, watch: Stopwatch) -> None:
        super().__init__(inner)
        self._watch = watch
        self.backward_began: float | None = None

    @property
    def phase(self) -> str:
        """Where in the step this rank is, in words."""
        return self._inner.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._inner.phase = phase
        if phase.endswith(" backward"):
            self.backward_began = self._watch.now()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call (see `Transport.exchange`)."""
        return self._inner.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        self._inner.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum over all ranks and keep this rank's slice."""
        self._inner.reduce_scatter(output, source)

    def reduce_scatter_async(self, output: Tensor, source: Tensor) -> Pending:
        """Begin a `reduce_scatter`."""
        return self._inner.reduce_scatter_async(output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Concatenate the tensors of all ranks."""
        self._inner.all_gather(output, source)

    def all_gather_async(self, output: Tensor, source: Tensor) -> Pending:
        """Begin an `all_gather`."""
        return self._inner.all_gather_async(output, source)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite with the tensor of rank `source`."""
        self._inner.broadcast(tensor, source)
