"""The transports of a world of one rank, and of one rank that is measured without the others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lengthwise.comm.clock import Clock
from lengthwise.comm.transport import Done, Key, Message, Pending, Transport


class SoloTransport:
    """The transport of a single rank; needs no process group."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device_ranks = 0, 1, 1
        self.phase = "start"
        self.clock = Clock()

    def connect(self, peers: Sequence[int]) -> None:
        assert not peers, f"a world of one cannot meet ranks {peers}"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        messages = [*sends, *receives]
        assert not messages, f"a world of one cannot exchange {len(messages)} messages"
        return Done()

    def all_reduce(self, tensor: Tensor) -> None:
        """Do nothing: the sum over one rank."""

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        output.copy_(source)

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        del key
        self.reduce_scatter(output, source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        output.copy_(source)

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        del key
        self.all_gather(output, source)
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Do nothing: there are no other ranks."""

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        """Return itself: the only group is the world."""
        assert [list(group) for group in groups] == [[0]], f"a world of one has no groups {groups}"
        return self

    def apart(self) -> Transport:
        return self

    def close(self) -> None:
        """Do nothing."""


class Lone(SoloTransport):
    """One rank of a ring or pipeline without the others, for measuring; it receives zeros."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def connect(self, peers: Sequence[int]) -> None:
        """Do nothing."""

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        own = next(list(ranks) for ranks in groups if self.rank in ranks)
        return type(self)(own.index(self.rank), len(own))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Drop the sends, and fill the receives with zeros."""
        del sends
        for message, _ in receives:
            message.zero_()
        return Done()
