"""The interface of rings and of the step's end to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from lengthwise.comm.clock import Clock

Message = tuple[Tensor, int]
"""A contiguous tensor and the rank that receives or sends it."""
Key: TypeAlias = tuple[object, ...]
"""Identity of a collective of a run (`engine.wave_order.CallKey`), the same on all ranks."""


def lies_on_a_device(tensor: Tensor) -> bool:
    """Return whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"


class Pending(Protocol):
    """A grouped call or collective under way; its tensors must not be used before `wait`."""

    def wait(self) -> None:
        """Wait until every message has arrived and left; on a GPU, make the current stream wait for that.

        TransferError, with rank, step and phase: a peer is gone or the time-out has passed.
        """


class Done:
    """A call that has already ended."""

    def wait(self) -> None:
        """Return at once."""


class Transport(Protocol):
    """Transfers and collectives between the ranks of one run."""

    rank: int
    world_size: int
    device_ranks: int  # ranks that share this rank's device, itself included
    clock: Clock

    @property
    def phase(self) -> str:
        """This rank's place in the step, in words; the caller sets it, and errors name it."""
        ...

    @phase.setter
    def phase(self, phase: str) -> None: ...

    def connect(self, peers: Sequence[int]) -> None:
        """Connect to these ranks, in one grouped call for all new ones; each of them must call it, too."""
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call. Messages between two ranks match in the order posted; there are no tags."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks, in place."""

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum `source` over all ranks and write this rank's slice, one world_size-th, to `output`."""

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        """Begin a `reduce_scatter`.

        Several collectives may be under way, posted in one order on all ranks. Without a `key`, none may be posted
        while this rank has a transfer under way, nor a transfer beside one: a rank that waits in one could wait for a
        rank that waits for it. With a `key`, transfers may be posted beside it: the key identifies the call on all
        ranks, which post it in the same place of one order, transfers included. Keys increase.
        """
        ...

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Concatenate the `source` of all ranks into `output`."""

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        """Begin an `all_gather`, under the rules of `reduce_scatter_async`."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with that of rank `source`."""

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        """Return the collectives of this rank's group, ranks counted from 0; `groups` divide the world. Collective."""
        ...

    def apart(self) -> Transport:
        """Return the same ranks with their own queue of transfers, which waits behind no others. Collective.

        Ranks still post these in one order with all others. Connections are not made yet.
        """
        ...

    def close(self) -> None:
        """Leave the world."""


class TransportWrapper:
    """A transport around another one; it passes on every call that a subclass does not override."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world_size, self.clock = inner.rank, inner.world_size, inner.clock
        self.device_ranks = inner.device_ranks

    @property
    def inner(self) -> Transport:
        """The wrapped transport."""
        return self._inner

    @property
    def phase(self) -> str:
        return self._inner.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._inner.phase = phase

    def connect(self, peers: Sequence[int]) -> None:
        self._inner.connect(peers)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._inner.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor) -> None:
        self._inner.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        self._inner.reduce_scatter(output, source)

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return self._inner.reduce_scatter_async(output, source, key=key)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._inner.all_gather(output, source)

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return self._inner.all_gather_async(output, source, key=key)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._inner.broadcast(tensor, source)

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        return self._inner.among(groups)

    def apart(self) -> Transport:
        return self._inner.apart()

    def close(self) -> None:
        self._inner.close()
