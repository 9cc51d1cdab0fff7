"""Messages through host memory: the same results, and no device tensor ever reaches the transport inside."""

import pytest
import torch
from testing import run_ranks
from testing.strict import StrictWorld

from lengthwise.comm import StagedTransport, agree, broadcast_bytes, join
from lengthwise.run.launch import launch
from tiers import some


class Device(torch.Tensor):
    """Stands for a tensor on a GPU: the same numbers, and not to be sent."""


class HostOnly(StagedTransport):
    """Wraps a transport and refuses what gloo could not read."""

    def __init__(self, inner):
        super().__init__(inner, stages=lambda tensor: False)

    def exchange(self, sends, receives):
        assert not any(isinstance(tensor, Device) for tensor, _ in (*sends, *receives))
        return super().exchange(sends, receives)

    def reduce_scatter(self, output, source):
        assert not isinstance(output, Device)
        assert not isinstance(source, Device)
        super().reduce_scatter(output, source)

    def all_gather(self, output, source):
        assert not isinstance(output, Device)
        assert not isinstance(source, Device)
        super().all_gather(output, source)

    def all_reduce(self, tensor):
        assert not isinstance(tensor, Device)
        super().all_reduce(tensor)


def on_device(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype).as_subclass(Device)


def staged(inner):
    return StagedTransport(HostOnly(inner), stages=lambda tensor: isinstance(tensor, Device))


def everything(t):
    """Use every call once, with tensors of the device and of the host; return what came out."""
    peer = 1 - t.rank
    out, room, host_room = on_device(1.0 + t.rank, 5.0), on_device(0.0, 0.0), torch.zeros(1)
    sends = [(out, peer), (torch.tensor([7.0 + t.rank]), peer)]
    t.exchange(sends, [(room, peer), (host_room, peer)]).wait()
    total = on_device(1.0 + t.rank)
    t.all_reduce(total)
    piece = on_device(0.0)
    t.reduce_scatter(piece, on_device(1.0, 2.0))
    later, everyone = on_device(0.0), on_device(0.0, 0.0)
    begun = [t.reduce_scatter_async(later, on_device(1.0, 2.0)), t.all_gather_async(everyone, on_device(3.0 + t.rank))]
    for each in begun:
        each.wait()
    assert (later.tolist(), everyone.tolist()) == (piece.tolist(), [3.0, 4.0])
    shared = on_device(10.0 + t.rank)
    t.broadcast(shared, 1)
    agree(t, b"plan", "plan")
    assert broadcast_bytes(t, b"x" if t.rank == 0 else None) == b"x"
    return [x.tolist() for x in (room, host_room, total, piece, shared)]


@pytest.mark.parametrize("run", some([lambda work: StrictWorld(2).run(work), lambda work: run_ranks(work, 2)], 0, 1))
def test_staged_transport_moves_and_sums(run):
    for rank, got in enumerate(run(lambda t: everything(staged(t)))):
        assert got == [[2.0 - rank, 5.0], [8.0 - rank], [3.0], [2.0 * (1 + rank)], [11.0]]


def test_staged_message_is_what_it_was_when_posted():
    """A tensor that changes after the call, as the next layer's keys do, changes nothing that was sent."""

    def work(inner):
        t = StagedTransport(inner, stages=lambda tensor: True)
        out, room = torch.tensor([1.0 + t.rank]), torch.zeros(1)
        pending = t.exchange([(out, 1 - t.rank)], [(room, 1 - t.rank)])
        out.fill_(99)
        assert room.item() == 0, "nothing arrives before the wait"
        pending.wait()
        return room.item()

    assert StrictWorld(2).run(work) == [2, 1]


def test_join_says_which_transport_and_why():
    def work(world, on_phase):
        said = []
        join(world, timeout_seconds=30, on_phase=on_phase, say=said.append).close()
        return said

    assert launch(work, 2) == ["transfers: gloo; because the run computes on the CPU"]
    assert launch(work, 1) == []
