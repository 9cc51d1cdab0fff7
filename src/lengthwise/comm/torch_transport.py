"""Transport over torch.distributed.

Transfers are grouped `batch_isend_irecv` calls only (a bare isend makes a communicator for each pair on NCCL) and have
a group of their own, also over all ranks, so that they never share a communicator with collectives. All edges that a
ring can use (neighbours at distance 1 and 2 on the rank line) are connected at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.comm.transport import Clock, Message, Pending
from lengthwise.comm.world import World
from lengthwise.core.errors import TransferError

Result = TypeVar("Result")


class TorchTransport:
    """The ranks of a torch.distributed world."""

    def __init__(
        self, world: World, *, timeout_seconds: float = 600.0, on_phase: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.world_size = world.rank, world.world_size
        self.clock = Clock()
        self._on_phase = on_phase
        self.phase = "start"
        self._timeout_seconds = timeout_seconds
        timeout = timedelta(seconds=timeout_seconds)
        self._guard(lambda: world.connect(timeout))
        self._collectives = dist.group.WORLD
        self._transfers = _all_ranks(timeout)
        self._connect_line(world.device)

    @property
    def phase(self) -> str:
        """Where in the step this rank is, in words."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self._on_phase is not None:
            self._on_phase(phase)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post one grouped call (see `Transport.exchange`)."""
        group = self._transfers
        operations = [dist.P2POp(dist.isend, tensor, peer, group=group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer, group=group) for tensor, peer in receives]
        peers = sorted({peer for _, peer in (*sends, *receives)})
        works = self._guard(lambda: dist.batch_isend_irecv(operations), peers) if operations else []
        # The tensors must outlive the transfer: gloo and NCCL read and write them in the background.
        return _TorchPending(self, works, peers, [tensor for tensor, _ in (*sends, *receives)])

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        self._guard(lambda: dist.all_reduce(tensor, group=self._collectives))

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum over all ranks and keep this rank's slice."""
        self._guard(lambda: _reduce_scatter(output, source, self._collectives))

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Concatenate the tensors of all ranks."""
        self._guard(lambda: _all_gather(output, source, self._collectives))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite with the tensor of rank `source`."""
        self._guard(lambda: dist.broadcast(tensor, source, group=self._collectives))

    def close(self) -> None:
        """Leave the world; without it torch warns at exit."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _connect_line(self, device: torch.device) -> None:
        peers = [peer for step in (-2, -1, 1, 2) if 0 <= (peer := self.rank + step) < self.world_size]
        # One collective before the first transfer: NCCL wants all ranks in the first call of a communicator.
        self._guard(lambda: dist.all_reduce(torch.zeros(1, device=device), group=self._transfers))
        sends = [(torch.zeros(1, device=device), peer) for peer in peers]
        receives = [(torch.zeros(1, device=device), peer) for peer in peers]
        self.exchange(sends, receives).wait()

    def _guard(self, call: Callable[[], Result], peers: Sequence[int] | None = None) -> Result:
        with self.clock.waiting():
            try:
                return call()
            except (RuntimeError, ValueError) as error:  # DistBackendError is a RuntimeError
                others = "all ranks" if peers is None else "ranks " + ", ".join(map(str, peers))
                raise TransferError(
                    f"rank {self.rank}, {self.phase}",
                    expected=f"{others} to answer within {self._timeout_seconds:g} s",
                    got=_without_place(str(error)),
                    remedy="Look at the first rank that reported another error, or died; then start again.",
                ) from error


class _TorchPending:
    def __init__(
        self, transport: TorchTransport, works: Sequence[dist.Work], peers: Sequence[int], alive: Sequence[Tensor]
    ) -> None:
        self._transport, self._works, self._peers, self._alive = transport, works, peers, alive

    def wait(self) -> None:
        for work in self._works:
            self._transport._guard(work.wait, self._peers)
        self._alive = ()


def _without_place(message: str) -> str:
    """Take gloo's first line without the file and line of its own source in front."""
    return re.sub(r"^\[[^\]]*\.(cc|h|cpp):\d+\] ", "", message.split("\n")[0])


def _all_ranks(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), f"every rank is a member of a group of all ranks, got {group}"
    return group


def _reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup | None) -> None:
    # torch 2.13 renames the call and deprecates the old name.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(output, source, group=group)


def _all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup | None) -> None:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, source, group=group)
