"""A transport around another that checks each message before it is taken.

gloo and NCCL match messages by order alone: of another length, gloo ends the process and NCCL waits or writes on. A
header goes ahead over a group of its own: number, dtype, shape and phase. Messages move when a call is waited for, so
nothing overlaps. The key of a collective is compared with that of the rank before. Ranks that have not met exchange
nothing: NCCL would connect them then, and hold up the host.

LENGTHWISE_TRANSPORT_WRAPPER=testing.checked:checked puts it around the transport of each rank of any run.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lengthwise.comm import TorchTransport
from lengthwise.comm.transport import Done, Key, Message, Pending, Transport, TransportWrapper
from lengthwise.core.errors import RankError
from lengthwise.program import line_peers

_DEFECT = "This is a defect of lengthwise: please report it."
_HEADER = struct.Struct("<q24s64s160s")
_ROOM = torch.empty(_HEADER.size, dtype=torch.uint8)

Exchange = Callable[[Sequence[Message], Sequence[Message]], Pending]
"""Posts one grouped call of host tensors, apart from all others."""


def checked(transport: Transport, world: TorchTransport) -> CheckedTransport:
    """Check what `transport` moves, by headers in a group of their own of `world`. Collective."""
    return CheckedTransport(transport, world.beside())


class CheckedTransport(TransportWrapper):
    """Sends a header ahead of each message of `inner`, by `exchange_headers`, and refuses what does not match."""

    def __init__(self, inner: Transport, exchange_headers: Exchange, *, ranks: Sequence[int] | None = None) -> None:
        super().__init__(inner)
        self._ranks = ranks or range(inner.world_size)  # as the headers' exchange counts them
        self._exchange_headers = exchange_headers
        self._met = {*line_peers(inner.rank, inner.world_size)}  # at the start
        self._sent, self._received = Counter[int](), Counter[int]()  # messages so far, by peer
        self._under_way: deque[_CheckedPending] = deque()

    def connect(self, peers: Sequence[int]) -> None:
        self._inner.connect(peers)
        self._met.update(peers)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Post the headers of one grouped call; its messages follow when it is waited for, in the order posted."""
        if not sends and not receives:
            return Done()
        if strangers := {peer for _, peer in (*sends, *receives)} - self._met:
            raise RankError(
                f"rank {self.rank}, {self.phase}",
                expected=f"messages with ranks that it has met: {sorted(self._met)}",
                got=f"one with {sorted(strangers)}",
                remedy=_DEFECT,
            )
        out = [(self._header(tensor, peer, self._sent).packed(), peer) for tensor, peer in sends]
        expected = [self._header(tensor, peer, self._received) for tensor, peer in receives]
        rooms = [(torch.empty(_HEADER.size, dtype=torch.uint8), peer) for _, peer in receives]
        pending = _CheckedPending(self, sends, receives, expected, rooms, self._exchange_headers(out, rooms))
        self._under_way.append(pending)
        return pending

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        self._compare(source, key)
        return self._inner.reduce_scatter_async(output, source, key=key)

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        self._compare(source, key)
        return self._inner.all_gather_async(output, source, key=key)

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        own = next(ranks for ranks in groups if self.rank in ranks)
        return CheckedTransport(self._inner.among(groups), self._exchange_headers, ranks=own)

    def apart(self) -> Transport:
        """Return itself: headers have one order."""
        return self

    def _compare(self, source: Tensor, key: Key | None) -> None:
        """Send the key of a collective to the next rank, and compare that of the rank before."""
        if key is None or len(self._ranks) == 1:
            return
        before, after = self._ranks[self.rank - 1], self._ranks[(self.rank + 1) % len(self._ranks)]
        header, room = _Header(0, str(source.dtype), str(list(source.shape)), str(key)), torch.empty_like(_ROOM)
        self._exchange_headers([(header.packed(), after)], [(room, before)]).wait()
        if _unpacked(room) != _unpacked(header.packed()):
            raise RankError(
                f"rank {self.rank}, {self.phase}",
                expected=f"rank {before} in the same collective as rank {self.rank}: {header}",
                got=str(_unpacked(room)),
                remedy=_DEFECT,
            )

    def _header(self, tensor: Tensor, peer: int, counts: Counter[int]) -> _Header:
        counts[peer] += 1
        return _Header(counts[peer], str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape)), self.phase)

    def _finish(self, pending: _CheckedPending) -> None:
        while pending in self._under_way:
            self._under_way.popleft().finish()


class _Header(NamedTuple):
    """What a message announces ahead of it."""

    number: int  # of this message among those from one rank to the other, from 1
    dtype: str
    shape: str
    phase: str  # it was posted in

    def packed(self) -> Tensor:
        """Return bytes (`_HEADER.size`,); long texts are cut."""
        return torch.frombuffer(
            bytearray(_HEADER.pack(self.number, *(each.encode() for each in self[1:]))), dtype=torch.uint8
        )

    def compared(self) -> tuple[object, ...]:
        """Return what must agree on both sides; numbers of microbatches are each rank's own."""
        return (*self[:3], re.sub(r"microbatch \d+ of \d+", "microbatch", self.phase))

    def __str__(self) -> str:
        return f"message {self.number}, {self.dtype} of shape {self.shape}, of {self.phase}"


def _unpacked(room: Tensor) -> _Header:
    number, *texts = _HEADER.unpack(bytes(room.numpy()))
    return _Header(number, *(text.rstrip(b"\0").decode(errors="replace") for text in texts))


class _CheckedPending:
    """A grouped call whose headers are under way and whose messages are not posted yet."""

    def __init__(
        self,
        transport: CheckedTransport,
        sends: Sequence[Message],
        receives: Sequence[Message],
        expected: Sequence[_Header],
        rooms: Sequence[Message],
        headers: Pending,
    ) -> None:
        self._transport, self._sends, self._receives = transport, sends, receives
        self._expected, self._rooms, self._headers = expected, rooms, headers
        self._phase = transport.phase

    def wait(self) -> None:
        self._transport._finish(self)

    def finish(self) -> None:
        rank, inner = self._transport.rank, self._transport._inner
        self._headers.wait()
        for expected, (room, peer) in zip(self._expected, self._rooms, strict=True):
            got = _unpacked(room)
            if got.compared() != _unpacked(expected.packed()).compared():
                remedy = f"{_DEFECT} Nothing of rank {peer}'s message was taken."
                raise RankError(
                    f"rank {rank}, {self._phase}",
                    expected=f"from rank {peer} to rank {rank}: {expected}",
                    got=str(got),
                    remedy=remedy,
                )
        inner.exchange(self._sends, self._receives).wait()
