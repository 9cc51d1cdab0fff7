"""A stopwatch of a rank, and a transport that notes when backward begins.

Clock "cpu" counts the seconds in which the process computed, and those in which it waited for messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from lengthwise.comm import Transport
from lengthwise.comm.transport import TransportWrapper
from lengthwise.core.measurements import Clock

Result = TypeVar("Result")


class Stopwatch:
    """Counts the seconds of a rank by one of two clocks; on a GPU it waits for launched work."""

    def __init__(self, clock: Clock, transport: Transport, device: torch.device) -> None:
        self._clock, self._transport, self._device = clock, transport, device

    def now(self) -> float:
        """Return the seconds since some fixed start."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._clock == "wall":
            return time.perf_counter()
        return time.process_time() + self._transport.clock.waited_seconds

    @property
    def waited(self) -> float:
        """Seconds of waits for messages since some fixed start."""
        return self._transport.clock.waited_seconds

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of `run`, with waits for messages."""
        return self.timed(run)[0]

    def timed(self, run: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of `run`, with waits for messages, and its result."""
        start = self.now()
        result = run()
        return self.now() - start, result


class WatchedTransport(TransportWrapper):
    """A transport wrapper that notes when backward begins."""

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
