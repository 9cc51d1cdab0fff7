"""A transport through host memory: what lies on a GPU is copied out, sent from there, and copied in again.

NCCL takes one rank a device. With this, two or four processes can share one GPU, which is what checks on a small
machine need; it is not fast. A message's bytes are the same, so results are those of any other transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lengthwise.comm.transport import Around, Done, Message, Pending, Transport, lies_on_a_device


class StagedTransport(Around):
    """A transport around one that moves host memory. `stages` says which tensors are copied; the others pass."""

    def __init__(self, inner: Transport, *, stages: Callable[[Tensor], bool] = lies_on_a_device) -> None:
        super().__init__(inner)
        self._stages = stages

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call (see `Transport.exchange`); messages to send are copied out before it."""
        host_sends = [(self._copied_out(tensor), peer) for tensor, peer in sends]
        arriving = [(self._host_tensor(tensor), peer) for tensor, peer in receives]
        arrivals = [(tensor, host) for (tensor, _), (host, _) in zip(receives, arriving, strict=True)]
        return _StagedPending(self._inner.exchange(host_sends, arriving), arrivals)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        host = self._copied_out(tensor)
        self._inner.all_reduce(host)
        _copy_in(tensor, host)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum over all ranks and keep this rank's slice."""
        host = self._host_tensor(output)
        self._inner.reduce_scatter(host, self._copied_out(source))
        _copy_in(output, host)

    def reduce_scatter_async(self, output: Tensor, source: Tensor) -> Pending:
        """Sum over all ranks and keep this rank's slice, at once."""
        self.reduce_scatter(output, source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Concatenate the tensors of all ranks."""
        host = self._host_tensor(output)
        self._inner.all_gather(host, self._copied_out(source))
        _copy_in(output, host)

    def all_gather_async(self, output: Tensor, source: Tensor) -> Pending:
        """Concatenate the tensors of all ranks, at once."""
        self.all_gather(output, source)
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite with the tensor of rank `source`."""
        host = self._copied_out(tensor)
        self._inner.broadcast(host, source)
        _copy_in(tensor, host)

    def _host_tensor(self, tensor: Tensor) -> Tensor:
        if not self._stages(tensor):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _copied_out(self, tensor: Tensor) -> Tensor:
        host = self._host_tensor(tensor)
        if host is not tensor:
            # Not non_blocking: the copy must have ended, and what it reads must have been computed, before it is sent.
            host.copy_(tensor.detach())
        return host


@torch.no_grad()
def _copy_in(tensor: Tensor, host: Tensor) -> None:
    if host is not tensor:
        tensor.copy_(host)


class _StagedPending:
    def __init__(self, pending: Pending, arrivals: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pending, self._arrivals = pending, arrivals

    def wait(self) -> None:
        self._pending.wait()
        for tensor, host in self._arrivals:
            _copy_in(tensor, host)
        self._arrivals = ()
