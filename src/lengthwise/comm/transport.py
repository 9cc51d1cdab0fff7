"""The interface that rings and the step's end talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from lengthwise.comm.clock import Clock

Message = tuple[Tensor, int]
"""A contiguous tensor and the rank it goes to or comes from."""
Key: TypeAlias = tuple[object, ...]
"""Which collective of a run a call is (`engine.wave_order.CallKey`): the same on all ranks."""


def lies_on_a_device(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"


class Pending(Protocol):
    """A grouped call or a collective under way; its tensors are not to be touched before `wait`."""

    def wait(self) -> None:
        """Return when every message has arrived and left, or on a GPU, when the current stream waits for that.

        Raises:
            TransferError: a peer is gone or the time-out passed; names rank, step and phase.
        """


class Done:
    """A call that is done already: nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Transport(Protocol):
    """Transfers between the ranks of one run."""

    rank: int
    world_size: int
    device_ranks: int  # that share the memory of this rank's device, this one counted
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

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        """Begin a `reduce_scatter`.

        Several collectives may be under way, posted in one order on all ranks. None may be posted while this rank has a
        transfer under way, nor a transfer beside one: a rank that waits in one might wait for a rank that waits for it.
        Transfers may be posted beside collectives with a `key`: it says which call of all ranks this is, so that all
        post it in the same place of one order, transfers included. Keys increase.
        """
        ...

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Put the `source` of every rank one after the other into `output`."""

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        """Begin an `all_gather`, under the rules of `reduce_scatter_async`."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with that of rank `source`."""

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        """Return the collectives of this rank's group, of ranks from 0; `groups` divide the world. Collective."""
        ...

    def apart(self) -> Transport:
        """Return the same ranks with transfers in an order of their own, which no other waits behind. Collective.

        Ranks still post these in one order with all others. No two have met.
        """
        ...

    def close(self) -> None:
        """Leave the world."""


class Around:
    """A transport around another, which does all that a subclass does not: rank, clock and phase are the other's."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world_size, self.clock = inner.rank, inner.world_size, inner.clock
        self.device_ranks = inner.device_ranks

    @property
    def inner(self) -> Transport:
        """The other transport."""
        return self._inner

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

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call (see `Transport.exchange`)."""
        return self._inner.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        self._inner.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum over all ranks and keep this rank's slice."""
        self._inner.reduce_scatter(output, source)

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        """Begin a `reduce_scatter`."""
        return self._inner.reduce_scatter_async(output, source, key=key)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Concatenate the tensors of all ranks."""
        self._inner.all_gather(output, source)

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        """Begin an `all_gather`."""
        return self._inner.all_gather_async(output, source, key=key)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite with the tensor of rank `source`."""
        self._inner.broadcast(tensor, source)

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        """Return the collectives of this rank's group (see `Transport.among`)."""
        return self._inner.among(groups)

    def apart(self) -> Transport:
        """Return the same ranks with transfers of their own (see `Transport.apart`)."""
        return self._inner.apart()

    def close(self) -> None:
        """Leave the world."""
        self._inner.close()
