"""Messages and collectives through host memory, for ranks that share a GPU: nothing else is sent, all arrives."""

import torch
from testing.ranks import fork_ranks
from testing.staged import StagedTransport
from testing.strict import StrictWorld

from lengthwise.comm import join
from lengthwise.comm.transport import TransportWrapper


class Device(torch.Tensor):
    """Stands for a tensor on a GPU: the same numbers, and not to be sent."""


class HostOnly(TransportWrapper):
    """Refuses what gloo could not read."""

    def exchange(self, sends, receives):
        assert not any(isinstance(tensor, Device) for tensor, _ in (*sends, *receives))
        return super().exchange(sends, receives)


def drawn(rank, call, *shape):
    generator = torch.Generator().manual_seed(10 * rank + call)
    return torch.randn(*shape, generator=generator)


def test_messages_and_sums_arrive_whole_in_whatever_order_they_are_waited_for():
    def work(inner):
        t, other, waits, rooms = StagedTransport(HostOnly(inner), stages=lambda _: True), 1 - inner.rank, [], []
        for call in range(3):
            rooms.append(torch.zeros(4, 2).as_subclass(Device))
            waits.append(t.exchange([(drawn(t.rank, call, 4, 2).as_subclass(Device), other)], [(rooms[-1], other)]))
        for pending in (*reversed(waits), *waits):
            pending.wait()
        assert all(torch.equal(room, drawn(other, call, 4, 2)) for call, room in enumerate(rooms))
        total, part = drawn(t.rank, 0, 6).as_subclass(Device), torch.zeros(3).as_subclass(Device)
        t.reduce_scatter(part, total)
        t.all_gather(everyone := torch.zeros(6).as_subclass(Device), part)
        t.all_reduce(total)
        t.broadcast(part, 1)
        summed = drawn(0, 0, 6) + drawn(1, 0, 6)
        return all(torch.equal(*pair) for pair in ((total, summed), (everyone, summed), (part, summed[3:])))

    assert StrictWorld(2).run(work) == [True] * 2


def test_join_says_which_transport_and_why():
    def work(world):
        said = []
        join(world, timeout_seconds=30, say=said.append).close()
        return said

    assert fork_ranks(work, 2) == [["transfers: gloo; because the run computes on the CPU"]] * 2
