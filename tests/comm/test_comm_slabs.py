"""Messages and collectives in chunks: the same results as whole, in a few pinned slabs, whatever their sizes."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from testing.ranks import fork_ranks
from testing.staged import Slabs, StagedTransport
from testing.strict import StrictWorld

from lengthwise.comm import join
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


def test_join_says_which_transport_and_why():
    def work(world):
        said = []
        join(world, timeout_seconds=30, say=said.append).close()
        return said

    assert fork_ranks(work, 2) == [["transfers: gloo; because the run computes on the CPU"]] * 2
    assert fork_ranks(work, 1) == [[]]
