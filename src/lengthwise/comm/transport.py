"""The interface that rings and the step's end talk to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

Message = tuple[Tensor, int]
"""A contiguous tensor and the rank it goes to or comes from."""


def lies_on_a_device(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"


class Pending(Protocol):
    """A grouped call or a collective under way; its tensors are not to be touched before `wait`."""

    def wait(self) -> None:
        """Return when every message has arrived and left; on a GPU, when the current stream is made to wait for them.

        Raises:
            TransferError: a peer is gone or the time-out passed; names rank, step and phase.
        """


class Done:
    """A call that is done already: nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Clock:
    """Seconds that a rank spent waiting for others; the rest of a step it was busy."""

    def __init__(self) -> None:
        self._waited_seconds = 0.0
        self._stream_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited_seconds += time.perf_counter() - start

    def note_stream_wait(self, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        """Count the time between two events of the compute stream as waiting, once the stream has got there."""
        self._stream_waits.append((before, after))

    @property
    def waited_seconds(self) -> float:
        """The sum so far; waits for the GPU to reach the events that were noted."""
        for before, after in self._stream_waits:
            after.synchronize()
            self._waited_seconds += before.elapsed_time(after) / 1e3
        self._stream_waits.clear()
        return self._waited_seconds


class Transport(Protocol):
    """Transfers between the ranks of one run."""

    rank: int
    world_size: int
    clock: Clock

    @property
    def phase(self) -> str:
        """Where in the step this rank is, in words; set by the caller and named in every error."""
        ...

    @phase.setter
    def phase(self, phase: str) -> None: ...

    def connect(self, peers: Sequence[int]) -> None:
        """Meet these ranks, in one grouped call of all that are new; each of them calls it for this rank, too."""
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call. Messages between two ranks match in the order posted; there are no tags."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks, in place."""

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum `source` over all ranks and put this rank's slice, one world_size-th, into `output`."""

    def reduce_scatter_async(self, output: Tensor, source: Tensor) -> Pending:
        """Begin a `reduce_scatter`.

        Several collectives may be under way, posted in one order on all ranks. None may be while this rank has a
        transfer under way, nor the other way round: a rank that waits in one might wait for a rank that waits for it.
        """
        ...

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Put the `source` of every rank one after the other into `output`."""

    def all_gather_async(self, output: Tensor, source: Tensor) -> Pending:
        """Begin an `all_gather`, under the rules of `reduce_scatter_async`."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with that of rank `source`."""

    def close(self) -> None:
        """Leave the world."""


class Around:
    """A transport around another: its rank, clock and phase are the other's."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world_size, self.clock = inner.rank, inner.world_size, inner.clock

    @property
    def phase(self) -> str:
        """Where in the step this rank is, in words."""
        return self._inner.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._inner.phase = phase

    def connect(self, peers: Sequence[int]) -> None:
        """Meet these ranks."""
        self._inner.connect(peers)

    def close(self) -> None:
        """Leave the world."""
        self._inner.close()
