"""A transport through host memory: tensors on a GPU are copied out, sent from there, and copied in again.

NCCL takes one rank per device; with this, several processes can share a GPU, for checks. Ranks that share one get it by
LENGTHWISE_TRANSPORT_WRAPPER=testing.staged:staged. Sums may round differently than NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lengthwise.comm.torch_transport import TorchTransport
from lengthwise.comm.transport import Done, Key, Message, Pending, Transport, TransportWrapper, lies_on_a_device


def staged(moving: Transport, world: TorchTransport) -> Transport:
    """Return `moving` through host memory if ranks share a GPU."""
    return StagedTransport(moving) if world.shares_gpus else moving


class StagedTransport(TransportWrapper):
    """Wraps a transport for host memory. stages: which tensors are copied; others pass unchanged."""

    def __init__(self, inner: Transport, *, stages: Callable[[Tensor], bool] = lies_on_a_device) -> None:
        super().__init__(inner)
        self._stages = stages

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call of copies on the host; what came is copied in when it is waited for."""
        rooms = [(self._copied_out(tensor), peer) for tensor, peer in receives]
        pending = self._inner.exchange([(self._copied_out(tensor), peer) for tensor, peer in sends], rooms)
        return _StagedPending(pending, [(into, host) for (into, _), (host, _) in zip(receives, rooms, strict=True)])

    def all_reduce(self, tensor: Tensor) -> None:
        host = self._copied_out(tensor)
        self._inner.all_reduce(host)
        _copy_in(tensor, host)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        host = self._copied_out(tensor)
        self._inner.broadcast(host, source)
        _copy_in(tensor, host)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        host = self._copied_out(output)
        self._inner.reduce_scatter(host, self._copied_out(source))
        _copy_in(output, host)

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        del key
        self.reduce_scatter(output, source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        host = self._copied_out(output)
        self._inner.all_gather(host, self._copied_out(source))
        _copy_in(output, host)

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        del key
        self.all_gather(output, source)
        return Done()

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        return StagedTransport(self._inner.among(groups), stages=self._stages)

    def apart(self) -> Transport:
        """Return the other order of transfers, also through host memory."""
        return StagedTransport(self._inner.apart(), stages=self._stages)

    def _copied_out(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the host: not non_blocking, because it must have ended before it is sent."""
        if not self._stages(tensor):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor.detach())
        return host


class _StagedPending:
    def __init__(self, pending: Pending, arrivals: list[tuple[Tensor, Tensor]]) -> None:
        self._pending, self._arrivals = pending, arrivals

    def wait(self) -> None:
        self._pending.wait()
        for tensor, host in self._arrivals:
            _copy_in(tensor, host)
        self._arrivals = []


def _copy_in(tensor: Tensor, host: Tensor) -> None:
    if host is not tensor:
        tensor.detach().copy_(host)
