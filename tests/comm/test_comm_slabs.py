"""Messages and collectives in chunks: the same results as whole, in a few pinned slabs, whatever their sizes."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing.strict import StrictWorld

from lengthwise.comm import StagedTransport
from lengthwise.comm.staged import Slabs, cut_into_rounds

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SLAB_BYTES = 64


class Pinned:
    """Counts what is pinned."""

    def __init__(self):
        self.slabs = []

    def __call__(self, size):
        self.slabs.append(torch.full((size,), 255, dtype=torch.uint8))
        return self.slabs[-1]


def staged(inner, pinned, most=4):
    return StagedTransport(inner, stages=lambda tensor: True, slabs=Slabs(slab_bytes=SLAB_BYTES, most=most, pin=pinned))


def _drawn(rank, number, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + number), dtype=dtype)


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
        t, waits, rooms, own = staged(inner, pinned[inner.rank], most), [], {}, random.Random(seed + inner.rank)
        for call in range(calls):
            sends, receives = [], []
            for peer in (each for each in range(ranks) if each != t.rank):
                sends += [(_drawn(t.rank, call, n, dtype), peer) for n in sizes[call, t.rank, peer]]
                found = [torch.zeros(n, dtype=dtype) for n in sizes[call, peer, t.rank]]
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


def test_message_of_100_slabs_needs_two_at_a_time_each_way():
    pinned = [Pinned(), Pinned()]

    def work(inner):
        t, room = staged(inner, pinned[inner.rank], most=99), torch.zeros(1600)
        t.exchange([(_drawn(t.rank, 0, 1600, torch.float32), 1 - t.rank)], [(room, 1 - t.rank)]).wait()
        t.all_gather(torch.zeros(1600), torch.zeros(800))
        t.reduce_scatter(torch.zeros(800), torch.zeros(1600))
        t.all_reduce(torch.zeros(800))
        return torch.equal(room, _drawn(1 - t.rank, 0, 1600, torch.float32))

    assert StrictWorld(2).run(work) == [True, True]
    assert [len(each.slabs) for each in pinned] == [4, 4]


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
