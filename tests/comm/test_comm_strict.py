"""The strict in-process transport: everything NCCL would hang on or gloo would hide is an error here."""

import pytest
import torch
from testing.strict import StrictWorld

from lengthwise.comm import SoloTransport, agree, broadcast_bytes
from lengthwise.core.errors import PlanError, RankError, TransferError


def full(value, size=2, dtype=torch.float32):
    return torch.full((size,), value, dtype=dtype)


def test_strict_completes_a_group_as_a_whole():
    """Rank 1's answer waits in rank 0's second group, behind a first group that misses rank 2: a deadlock."""

    def work(t):
        if t.rank == 0:
            first = t.exchange([(full(1), 1)], [(full(0), 2)])
            second = t.exchange([], [(full(0), 1)])
            second.wait()
            first.wait()
        elif t.rank == 1:
            t.exchange([], [(full(0), 0)]).wait()
            t.exchange([(full(1), 0)], []).wait()
            t.exchange([(full(1), 2)], []).wait()
        else:
            t.exchange([], [(full(0), 1)]).wait()
            t.exchange([(full(1), 0)], []).wait()

    with pytest.raises(TransferError, match="deadlock"):
        StrictWorld(3).run(work)


def swap(t):
    return t.exchange([(full(1), 1 - t.rank)], [(full(0), 1 - t.rank)])


def scatter(t):
    return t.reduce_scatter_async(full(1, 1), full(1))


def gather(t, **how):
    if how:
        t.all_gather(full(1), full(1, 1))
    return t.all_gather_async(full(1), full(1, 1), **how)


def send(sent, room):
    return lambda t: t.exchange(*(([(sent, 1)], []) if t.rank == 0 else ([], [(room, 0)]))).wait()


def reduce_at(rank):
    """A sum, before a transfer on one rank and after it on the other."""
    return lambda t: [call(t) for call in ((full_sum, wait_swap) if t.rank == rank else (wait_swap, full_sum))]


def full_sum(t, **how):
    t.all_reduce(full(1, **how))


def wait_swap(t):
    swap(t).wait()


def far_message(t):
    """Rank 0 sends to rank 3, which it meets only where both of them connect."""
    if t.rank == 3:
        t.exchange([], [(full(0), 0)]).wait()
    elif t.rank == 0:
        t.exchange([(full(1), 3)], []).wait()


def reduces_after_gather(t):
    gather(t, key=(1,)).wait()
    t.reduce_scatter_async(full(1, 1), full(1), key=(2,)).wait()


def gathers_more(t):
    gather(t, key=(1,)).wait()
    t.all_gather_async(full(1, 4), full(1), key=(2,)).wait()


SIZES = "rank 0 to rank 1"
BESIDE = r"no collective under way .*; got 1 not waited for, .* start"
BEFORE = "no transfer under way when a collective is posted"
SAME = "the same collective calls in the same order"
REFUSED = [
    (send(torch.zeros(3), torch.zeros(4)), SIZES),
    (send(torch.zeros(4), torch.zeros(4, dtype=torch.float64)), SIZES),
    (reduce_at(0), "deadlock"),
    (lambda t: t.rank or full_sum(t), r"gone: \[1\]"),
    # Both ranks do the same, so it would go well here; on NCCL it holds up whoever is not there yet.
    (lambda t: (scatter(t), swap(t)), BESIDE),
    (lambda t: (swap(t), scatter(t)), BEFORE),
    (lambda t: full_sum(t) if t.rank else t.broadcast(full(1), 0), SAME),
    (lambda t: full_sum(t, dtype=torch.float64 if t.rank else torch.float32), SAME),
    (lambda t: [each.wait() for each in ((scatter(t), gather(t)) if t.rank else (gather(t), scatter(t)))], SAME),
    (lambda t: gather(t, key=(1 + t.rank,)).wait(), SAME),
    (lambda t: (gather(t, key=(2,)).wait(), gather(t, key=(1,)).wait()), "order of their keys"),
    # Calls that would connect ranks.
    (far_message, r"one of ranks \[1, 2\], which it has met; got rank 3"),
    (reduces_after_gather, "as one before it without a key; got the first of .'reduce_scatter'"),
    (gathers_more, r"got the first of .'all_gather', \(\(4,\)"),
]


@pytest.mark.parametrize(("work", "said"), REFUSED)
def test_strict_refuses_what_would_hang_or_be_wrong(work, said):
    with pytest.raises((TransferError, PlanError), match=said):
        StrictWorld(4 if work is far_message else 2).run(work)


def test_agree_names_the_ranks_that_differ():
    def work(t):
        t.phase = "agreeing"
        agree(t, b"same", "plan")
        with pytest.raises(RankError, match=r"agreeing.*same plan on all ranks.*ranks 1, 3"):
            agree(t, b"other" if t.rank in (1, 3) else b"same", "plan")
        return True

    assert StrictWorld(4).run(work) == [True] * 4


def test_world_of_one_needs_no_one():
    t, out, everyone = SoloTransport(), torch.full((3,), 7.0), torch.full((3,), 7.0)
    agree(t, b"x", "plan")
    assert broadcast_bytes(t, b"abc") == b"abc"
    pending = t.reduce_scatter_async(out, torch.arange(3.0)), t.all_gather_async(everyone, out)
    assert [each.wait() for each in pending] == [None, None]
    t.all_reduce(out)
    t.broadcast(out, 0)
    assert out.tolist() == everyone.tolist() == [0, 1, 2]
    t.exchange([], []).wait()
    with pytest.raises(AssertionError, match="world of one"):
        t.exchange([(out, 0)], [])
