"""Messages and collectives in chunks: the same results as whole, in a few pinned slabs, whatever their sizes."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import run_ranks
from testing.ranks import fork_ranks
from testing.staged import Slabs, StagedTransport, cut_into_rounds
from testing.strict import StrictWorld

from lengthwise.comm import agree, join
from lengthwise.comm.transport import TransportWrapper

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SLAB_BYTES = 64


class Pinned:
    """Counts what is pinned."""

    def __init__(self):
        self.slabs = []

    def __call__(self, size):
        self.slabs.append(torch.full((size,), 255, dtype=torch.uint8))
        return self.slabs[-1]


class Device(torch.Tensor):
    """Stands for a tensor on a GPU: the same numbers, and not to be sent."""


class HostOnly(TransportWrapper):
    """Refuses what gloo could not read."""

    def exchange(self, sends, receives):
        assert not any(isinstance(tensor, Device) for tensor, _ in (*sends, *receives))
        return super().exchange(sends, receives)


def staged(inner, pinned, most=4):
    slabs = Slabs(slab_bytes=SLAB_BYTES, most=most, pin=pinned)
    return StagedTransport(HostOnly(inner), stages=lambda tensor: True, slabs=slabs)


def _drawn(rank, number, size, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(size, generator=generator, dtype=dtype).as_subclass(Device)


@given(
    choose=st.randoms(use_true_random=False), ranks=st.integers(2, 4), calls=st.integers(1, 4), most=st.integers(0, 6)
)
def test_messages_of_any_size_arrive_whole_in_a_few_slabs(choose, ranks, calls, most):
    """Some ranks wait for each call at once, some for several and in any order."""
    sizes = {
        (call, a, b): [choose.choice([0, 1, 7, 8, 9, 40, 200]) for _ in range(choose.randrange(3))]
        for call in range(calls)
        for a in range(ranks)
        for b in range(ranks)
        if a != b
    }
    dtype, seed = choose.choice(DTYPES), choose.randrange(1000)
    pinned = [Pinned() for _ in range(ranks)]

    def work(inner):
        inner.connect([each for each in range(ranks) if each != inner.rank])
        t, waits, rooms, own = staged(inner, pinned[inner.rank], most), [], {}, random.Random(seed + inner.rank)
        for call in range(calls):
            sends, receives = [], []
            for peer in (each for each in range(ranks) if each != t.rank):
                sends += [(_drawn(t.rank, call, n, dtype), peer) for n in sizes[call, t.rank, peer]]
                found = [torch.zeros(n, dtype=dtype).as_subclass(Device) for n in sizes[call, peer, t.rank]]
                receives += [(room, peer) for room in found]
                rooms[call, peer] = found
            waits.append(t.exchange(sends, receives))
            if own.random() < 0.5:
                waits.pop(own.randrange(len(waits))).wait()
        own.shuffle(waits)
        for pending in waits:
            pending.wait()
            pending.wait()
        return all(
            torch.equal(room, _drawn(peer, call, len(room), dtype))
            for (call, peer), found in rooms.items()
            for room in found
        )

    assert StrictWorld(ranks).run(work) == [True] * ranks
    assert all(len(each.slabs) <= most for each in pinned)


@given(ranks=st.integers(1, 5), size=st.integers(0, 60), dtype=st.sampled_from(DTYPES), most=st.integers(0, 3))
def test_collectives_in_chunks_are_those_of_whole_tensors(ranks, size, dtype, most):
    pinned = [Pinned() for _ in range(ranks)]

    def everything(t):
        part, whole = torch.zeros(size, dtype=dtype), torch.zeros(ranks * size, dtype=dtype)
        t.reduce_scatter(part, _drawn(t.rank, 0, ranks * size, dtype))
        t.all_gather(whole, part)
        again = torch.zeros(ranks * size, dtype=dtype)
        for pending in (t.all_gather_async(again, part), t.reduce_scatter_async(part, again)):
            pending.wait()
        total, told = _drawn(t.rank, 1, size, dtype), _drawn(t.rank, 2, size, dtype)
        t.all_reduce(total)
        t.broadcast(told, ranks - 1)
        return part, whole, again, total, told

    plain = StrictWorld(ranks).run(everything)
    chunked = StrictWorld(ranks).run(lambda t: everything(staged(t, pinned[t.rank], most)))
    assert all(torch.equal(a, b) for x, y in zip(plain, chunked, strict=True) for a, b in zip(x, y, strict=True))
    assert all(len(each.slabs) <= most for each in pinned)


def test_gather_over_its_own_source_in_chunks():
    """Flat parameters publish that way: each rank's slice is part of the buffer."""

    def work(inner):
        t, buffer = staged(inner, Pinned()), torch.zeros(80)
        mine = buffer[40 * t.rank : 40 * t.rank + 40]
        mine.copy_(torch.arange(40.0) + 100 * t.rank)
        t.all_gather(buffer, mine)
        return buffer

    expected = torch.cat([torch.arange(40.0), torch.arange(40.0) + 100])
    assert all(torch.equal(found, expected) for found in StrictWorld(2).run(work))


def test_a_message_is_what_it_was_when_posted():
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


def test_messages_and_collectives_through_host_memory_on_gloo():
    def work(inner):
        t, room = StagedTransport(inner, stages=lambda tensor: tensor.dtype == torch.float64), torch.zeros(2).double()
        host = torch.zeros(1)
        sends = [(torch.full((2,), 5.0 + t.rank).double(), 1 - t.rank), (torch.tensor([7.0 + t.rank]), 1 - t.rank)]
        t.exchange(sends, [(room, 1 - t.rank), (host, 1 - t.rank)]).wait()
        total, shared = torch.ones(1).double() + t.rank, torch.full((1,), 10.0 + t.rank).double()
        t.all_reduce(total)
        t.broadcast(shared, 1)
        agree(t, b"plan", "plan")
        return [x.tolist() for x in (room, host, total, shared)]

    for rank, got in enumerate(run_ranks(work, 2)):
        assert got == [[6.0 - rank] * 2, [8.0 - rank], [3.0], [11.0]]


def test_join_says_which_transport_and_why():
    def work(world):
        said = []
        join(world, timeout_seconds=30, say=said.append).close()
        return said

    assert fork_ranks(work, 2) == [["transfers: gloo; because the run computes on the CPU"]] * 2
    assert fork_ranks(work, 1) == [[]]


def test_rounds_pair_the_chunks_of_two_ranks_whatever_else_each_has_to_do():
    slabs = Slabs(slab_bytes=SLAB_BYTES)
    large, small, odd = torch.arange(40.0), torch.arange(3.0), torch.arange(17.0)
    ours = cut_into_rounds([(large, 1), (small, 1), (odd, 2)], [(small, 2)], slabs)
    theirs = cut_into_rounds([], [(large, 0), (small, 0)], slabs)
    to_1 = [[tensor.tolist() for tensor, peer in each.sends if peer == 1] for each in ours]
    assert to_1 == [[tensor.tolist() for tensor, _ in each.receives] for each in theirs]
    assert [sum(map(len, each)) for each in to_1] == [16, 16, 8, 3]
    assert [len(each.sends) for each in ours] == [2, 2, 1, 1]


def test_messages_must_be_contiguous_and_collectives_of_the_right_size():
    t = staged(next(iter(StrictWorld(1).run(lambda inner: inner))), Pinned())
    with pytest.raises(AssertionError, match="contiguous"):
        t.exchange([(torch.zeros(4, 4).T, 0)], [])
    for call in (t.reduce_scatter, t.all_gather):
        with pytest.raises(AssertionError, match="1 ranks of"):
            call(torch.zeros(4), torch.zeros(5))
