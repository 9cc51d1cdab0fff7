"""A transport through host memory: tensors on a GPU are copied out, sent from there, and copied in again.

NCCL takes one rank per device; with this, several processes can share a GPU, for checks. Ranks that share one get it by
LENGTHWISE_TRANSPORT_WRAPPER=testing.staged:staged. Messages are cut into chunks of a few pinned slabs (`Slabs`), with
two rounds under way at a time. Sums may round differently than NCCL's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from lengthwise.comm.torch_transport import TorchTransport
from lengthwise.comm.transport import Done, Key, Message, Pending, Transport, TransportWrapper, lies_on_a_device

SLAB_BYTES = 8 << 20  # copies of this size run at full speed
MOST_SLABS = 16
_ROUNDS_UNDER_WAY = 2


def staged(moving: Transport, world: TorchTransport) -> Transport:
    """Return `moving` through host memory if ranks share a GPU."""
    return StagedTransport(moving) if world.shares_gpus else moving


class StagedTransport(TransportWrapper):
    """Wraps a transport for host memory. stages: which tensors are copied; others pass unchanged."""

    def __init__(
        self,
        inner: Transport,
        *,
        stages: Callable[[Tensor], bool] = lies_on_a_device,
        slabs: Slabs | None = None,
    ) -> None:
        super().__init__(inner)
        self._stages = stages
        self._slabs = Slabs() if slabs is None else slabs
        self._under_way: deque[_StagedPending] = deque()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post the first two rounds of a grouped call, the rest while waiting; calls complete in the order posted."""
        rounds = cut_into_rounds(sends, receives, self._slabs)
        if not rounds:
            return Done()
        on_gpu = any(tensor.is_cuda for tensor, _ in (*sends, *receives))
        pending = _StagedPending(self, rounds, on_gpu=on_gpu)
        self._under_way.append(pending)
        self._post_in_order()
        return pending

    def all_reduce(self, tensor: Tensor) -> None:
        self._in_place(tensor, self._inner.all_reduce)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._in_place(tensor, lambda host: self._inner.broadcast(host, source))

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        self._refuse_sizes(whole=source, part=output)
        if not self._stages(output):
            self._inner.reduce_scatter(output, source)
            return
        whole, part = source.detach().view(self.world_size, -1), output.detach().view(-1)
        for start, stop in self._slabs.chunks(part, parts=self.world_size):
            host_whole, host_part = self._copied_out(whole[:, start:stop]), self._slabs.take(part[start:stop])
            with self.clock.waiting(on_stream=output.is_cuda, in_collective=True):
                self._inner.reduce_scatter(host_part, host_whole)
            self._copy_in(part[start:stop], host_part)
            self._slabs.give(host_whole)

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        del key
        self.reduce_scatter(output, source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._refuse_sizes(whole=output, part=source)
        if not self._stages(output):
            self._inner.all_gather(output, source)
            return
        whole, part = output.detach().view(self.world_size, -1), source.detach().view(-1)
        for start, stop in self._slabs.chunks(part, parts=self.world_size):
            host_part, host_whole = self._copied_out(part[start:stop]), self._slabs.take(whole[:, start:stop])
            with self.clock.waiting(on_stream=output.is_cuda, in_collective=True):
                self._inner.all_gather(host_whole, host_part)
            self._copy_in(whole[:, start:stop], host_whole)
            self._slabs.give(host_part)

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        del key
        self.all_gather(output, source)
        return Done()

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        """Return the collectives of this rank's group, also through host memory."""
        return StagedTransport(self._inner.among(groups), stages=self._stages, slabs=self._slabs)

    def apart(self) -> Transport:
        """Return itself: two orders of rounds could deadlock, each waiting for the other's slabs."""
        return self

    def _in_place(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        if not self._stages(tensor):
            call(tensor)
            return
        flat = tensor.detach().view(-1)
        for start, stop in self._slabs.chunks(flat):
            host = self._copied_out(flat[start:stop])
            with self.clock.waiting(on_stream=tensor.is_cuda, in_collective=True):
                call(host)
            self._copy_in(flat[start:stop], host)

    def _refuse_sizes(self, *, whole: Tensor, part: Tensor) -> None:
        expected, got = self.world_size * part.numel(), whole.numel()
        assert got == expected, f"{self.world_size} ranks of {part.numel()} elements: {expected}, got {got}"

    def _copied_out(self, tensor: Tensor) -> Tensor:
        host = self._slabs.take(tensor)
        # Not non_blocking: the copy must have ended before it is sent.
        host.view(tensor.shape).copy_(tensor)
        return host

    def _copy_in(self, tensor: Tensor, host: Tensor) -> None:
        tensor.copy_(host.view(tensor.shape))
        self._slabs.give(host)

    def _post_in_order(self) -> None:
        """Post calls in order, because messages between two ranks match by order."""
        for pending in self._under_way:
            if not pending.post():
                return

    def _post(self, each: ChunkRound) -> _RoundUnderWay:
        sends = [(self._copied_out(tensor) if self._stages(tensor) else tensor, peer) for tensor, peer in each.sends]
        rooms = [self._slabs.take(tensor) if self._stages(tensor) else tensor for tensor, _ in each.receives]
        receives = [(room, peer) for room, (_, peer) in zip(rooms, each.receives, strict=True)]
        arrivals = [
            (tensor, room) for (tensor, _), room in zip(each.receives, rooms, strict=True) if room is not tensor
        ]
        return _RoundUnderWay(self._inner.exchange(sends, receives), [host for host, _ in sends], arrivals)

    def _finish(self, pending: _StagedPending) -> None:
        while pending in self._under_way:
            first = self._under_way[0]
            first.finish()
            self._under_way.popleft()
            self._post_in_order()


class _RoundUnderWay:
    def __init__(self, pending: Pending, sent: Sequence[Tensor], arrivals: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.pending, self.sent, self.arrivals = pending, sent, arrivals


class _StagedPending:
    """A grouped call with some rounds under way and others not posted."""

    def __init__(self, transport: StagedTransport, rounds: Sequence[ChunkRound], *, on_gpu: bool) -> None:
        self._transport, self._on_gpu = transport, on_gpu
        self._to_post, self._posted = deque(rounds), deque[_RoundUnderWay]()

    def wait(self) -> None:
        self._transport._finish(self)

    def post(self) -> bool:
        """Post as many rounds as may be under way; return whether all are posted."""
        while self._to_post and len(self._posted) < _ROUNDS_UNDER_WAY:
            self._posted.append(self._transport._post(self._to_post.popleft()))
        return not self._to_post

    def finish(self) -> None:
        transport = self._transport
        while self._posted or self._to_post:
            self.post()
            done = self._posted.popleft()
            with transport.clock.waiting(on_stream=self._on_gpu):
                done.pending.wait()
            for host in done.sent:
                transport._slabs.give(host)
            for tensor, host in done.arrivals:
                transport._copy_in(tensor, host)


class Slabs:
    """At most `most` pinned slabs of `slab_bytes` each, made when first needed; beyond them, plain host memory."""

    def __init__(
        self,
        *,
        slab_bytes: int = SLAB_BYTES,
        most: int = MOST_SLABS,
        pin: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.slab_bytes = slab_bytes
        self._most, self._pin = most, pin or _pinned
        self._pinned = 0
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        """Return one-dimensional host memory for the elements of a tensor, at most a slab."""
        size = like.numel() * like.element_size()
        assert size <= self.slab_bytes, f"{size} bytes do not fit a slab of {self.slab_bytes}"
        if not self._free and self._pinned == self._most:
            return torch.empty(like.numel(), dtype=like.dtype)
        if not self._free:
            self._free.append(self._pin(self.slab_bytes))
            self._pinned += 1
        slab = self._free.pop()
        room = slab[:size].view(like.dtype)
        self._lent[room.data_ptr()] = slab
        return room

    def give(self, room: Tensor) -> None:
        """Take back memory that `take` returned."""
        slab = self._lent.pop(room.data_ptr(), None)
        if slab is not None:
            self._free.append(slab)

    def chunks(self, tensor: Tensor, *, parts: int = 1) -> list[tuple[int, int]]:
        """Return (start, stop), in elements, of chunks of a tensor; `parts` of them fit a slab together."""
        step = max(1, self.slab_bytes // (parts * tensor.element_size()))
        return [(start, min(start + step, tensor.numel())) for start in range(0, tensor.numel(), step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRound:
    """Chunks that travel together: at most one per peer and direction."""

    sends: list[Message]
    receives: list[Message]


def cut_into_rounds(sends: Sequence[Message], receives: Sequence[Message], slabs: Slabs) -> list[ChunkRound]:
    """Cut a grouped call into chunks; the i-th chunk between two ranks is in round i, so both sides pair them."""
    return [
        ChunkRound(sends=list(filter(None, out)), receives=list(filter(None, into)))
        for out, into in zip_longest(_by_peer(sends, slabs), _by_peer(receives, slabs), fillvalue=())
    ]


def _by_peer(messages: Sequence[Message], slabs: Slabs) -> list[tuple[Message | None, ...]]:
    """Return, round by round, one chunk of each peer's messages, in the given order."""
    chunks: dict[int, list[Message]] = {}
    for tensor, peer in messages:
        assert tensor.is_contiguous(), f"messages must be contiguous, got strides {tensor.stride()}"
        flat = tensor.detach().view(-1)
        chunks.setdefault(peer, []).extend((flat[start:stop], peer) for start, stop in slabs.chunks(flat))
    return list(zip_longest(*chunks.values()))


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
