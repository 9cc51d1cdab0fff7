"""The strict in-process transport: everything NCCL would hang on or gloo would hide is an error here."""

import threading

import pytest
import torch
from testing.strict import StrictWorld

from lengthwise.comm import SoloTransport, agree, broadcast_bytes
from lengthwise.core.errors import RankError, TransferError


def full(value, size=2, dtype=torch.float32):
    return torch.full((size,), value, dtype=dtype)


def test_strict_matches_first_in_first_out_without_tags():
    def work(t):
        if t.rank == 0:
            t.exchange([(full(1), 1), (full(2), 1)], []).wait()
            t.exchange([(full(3), 1)], []).wait()
            return None
        a, b, c = (full(0) for _ in range(3))
        t.exchange([], [(a, 0)]).wait()
        t.exchange([], [(b, 0), (c, 0)]).wait()
        return [x[0].item() for x in (a, b, c)]

    assert StrictWorld(2).run(work)[1] == [1, 2, 3]


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


def test_strict_raises_a_deadlock_on_all_ranks_and_names_them():
    seen = {}

    def work(t):
        t.phase = f"place {t.rank}"
        try:
            t.exchange([], [(full(0), (t.rank + 1) % 3)]).wait()
        except TransferError as error:
            seen[t.rank] = str(error)
            raise

    with pytest.raises(TransferError) as raised:
        StrictWorld(3).run(work)
    assert seen.keys() == {0, 1, 2}
    for text in (*seen.values(), str(raised.value)):
        assert all(f"rank {rank} in place {rank}" in text for rank in range(3)), text


@pytest.mark.parametrize(
    ("sent", "room"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(4), torch.zeros(3)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16)),
    ],
)
def test_strict_refuses_another_shape_or_dtype(sent, room):
    def work(t):
        t.exchange(*(([(sent, 1)], []) if t.rank == 0 else ([], [(room, 0)]))).wait()

    with pytest.raises(TransferError, match="rank 0 to rank 1"):
        StrictWorld(2).run(work)


def test_strict_collectives_are_right():
    def work(t):
        total = full(t.rank + 1.0, 4)
        t.all_reduce(total)
        piece = torch.empty(2)
        t.reduce_scatter(piece, torch.arange(6.0) * (t.rank + 1))
        everyone = torch.empty(6)
        t.all_gather(everyone, full(t.rank))
        told = full(t.rank)
        t.broadcast(told, 2)
        return [x.tolist() for x in (total, piece, everyone, told)]

    for rank, (total, piece, everyone, told) in enumerate(StrictWorld(3).run(work)):
        assert total == [6] * 4
        assert piece == [6 * (2 * rank), 6 * (2 * rank + 1)]
        assert everyone == [0, 0, 1, 1, 2, 2]
        assert told == [2, 2]


def test_strict_finds_a_collective_against_a_transfer():
    def work(t):
        if t.rank == 0:
            t.all_reduce(full(1))
        t.exchange([(full(1), 1 - t.rank)], [(full(0), 1 - t.rank)]).wait()
        if t.rank == 1:
            t.all_reduce(full(1))

    with pytest.raises(TransferError, match="deadlock"):
        StrictWorld(2).run(work)


@pytest.mark.parametrize("under_way", ["reduce_scatter_async", "all_gather_async"])
def test_strict_refuses_a_transfer_while_a_collective_is_under_way(under_way):
    """Both ranks do the same, so it would go well here; on NCCL it holds up whoever is not there yet."""

    def work(t):
        t.phase = f"publishing {t.rank}"
        sizes = (1, 2) if under_way == "reduce_scatter_async" else (2, 1)
        getattr(t, under_way)(*(full(1, size) for size in sizes))
        t.exchange([(full(1), 1 - t.rank)], [(full(0), 1 - t.rank)])

    with pytest.raises(TransferError, match=r"no collective under way .*; got 1 not waited for, .* publishing [01]\."):
        StrictWorld(2).run(work)


@pytest.mark.parametrize(
    "collective",
    [
        lambda t: t.reduce_scatter_async(full(1, 1), full(1)),
        lambda t: t.all_gather_async(full(1), full(1, 1)),
        lambda t: t.all_reduce(full(1)),
        lambda t: t.broadcast(full(1), 0),
    ],
)
def test_strict_refuses_a_collective_before_a_ranks_last_transfer_is_over(collective):
    def work(t):
        t.exchange([(full(1), 1 - t.rank)], [(full(0), 1 - t.rank)])
        collective(t)

    with pytest.raises(TransferError, match="no transfer under way when a collective is posted"):
        StrictWorld(2).run(work)


COLLECTIVES_THAT_DIFFER = {
    "kind": (lambda t: t.all_reduce(full(1)), lambda t: t.broadcast(full(1), 0)),
    "shape": (lambda t: t.all_reduce(full(1)), lambda t: t.all_reduce(full(1, 3))),
    "dtype": (lambda t: t.all_reduce(full(1)), lambda t: t.all_reduce(full(1, dtype=torch.float64))),
    "order": (
        lambda t: [t.reduce_scatter_async(full(1, 1), full(1)), t.all_gather_async(full(1), full(1, 1))],
        lambda t: [t.all_gather_async(full(1), full(1, 1)), t.reduce_scatter_async(full(1, 1), full(1))],
    ),
}


@pytest.mark.parametrize("what", COLLECTIVES_THAT_DIFFER)
def test_strict_refuses_collectives_that_differ(what):
    def work(t):
        COLLECTIVES_THAT_DIFFER[what][t.rank](t)
        t.all_reduce(full(1))

    with pytest.raises(TransferError, match="the same collective calls in the same order"):
        StrictWorld(2).run(work)


def test_strict_refused_rank_releases_those_that_wait_and_is_the_one_told_of():
    def work(t):
        t.phase = f"on {t.rank}"
        if t.rank == 2:
            t.all_gather_async(full(1, 3), full(1, 1))
            t.exchange([(full(1), 0)], [])
        t.exchange([], [(full(0), 2)]).wait()

    with pytest.raises(TransferError, match="rank 2, on 2: expected no collective under way"):
        StrictWorld(3).run(work)


def test_strict_failing_rank_releases_the_others_and_is_the_one_raised():
    def work(t):
        if t.rank == 2:
            raise ValueError("rank 2 has its own reason")
        t.exchange([], [(full(0), 2)]).wait()

    with pytest.raises(ValueError, match="its own reason"):
        StrictWorld(4).run(work)
    assert not [thread for thread in threading.enumerate() if thread is not threading.main_thread()]


def test_strict_rank_that_returns_early_releases_the_others():
    def work(t):
        if t.rank:
            t.all_reduce(full(1))

    with pytest.raises(TransferError, match=r"gone: \[0\]"):
        StrictWorld(3).run(work)


def test_strict_counts_waiting_apart_from_working():
    def work(t):
        if t.rank == 0:
            threading.Event().wait(0.2)
        t.all_reduce(full(1))
        return t.clock.waited_seconds

    slow, fast = StrictWorld(2).run(work)
    assert fast > 0.15
    assert slow < 0.1


def test_agree_names_the_ranks_that_differ():
    def work(t):
        t.phase = "agreeing"
        agree(t, b"same", "plan")
        with pytest.raises(RankError, match=r"agreeing.*same plan on all ranks.*ranks 1, 3"):
            agree(t, b"other" if t.rank in (1, 3) else b"same", "plan")
        return True

    assert StrictWorld(4).run(work) == [True] * 4


def test_broadcast_bytes_sends_any_size_from_any_rank():
    def work(t):
        return [broadcast_bytes(t, data if t.rank == 1 else None, source=1) for data in (b"", b"x", bytes(range(256)))]

    assert StrictWorld(3).run(work) == [[b"", b"x", bytes(range(256))]] * 3


def test_world_of_one_needs_no_one():
    t = SoloTransport()
    agree(t, b"x", "plan")
    assert broadcast_bytes(t, b"abc") == b"abc"
    out = torch.empty(3)
    t.reduce_scatter(out, torch.arange(3.0))
    t.all_reduce(out)
    t.broadcast(out, 0)
    assert out.tolist() == [0, 1, 2]
    pending = t.reduce_scatter_async(out, torch.arange(3.0) + 1), t.all_gather_async(everyone := torch.empty(3), out)
    assert [each.wait() for each in pending] == [None, None]
    assert out.tolist() == everyone.tolist() == [1, 2, 3]
    t.exchange([], []).wait()
    with pytest.raises(AssertionError, match="world of one"):
        t.exchange([(out, 0)], [])


def test_strict_lets_transfers_beside_collectives_with_a_key():
    def work(t):
        everyone = torch.zeros(2)
        gather = t.all_gather_async(everyone, full(t.rank, 1), key=(1, 0))
        got = full(-1, 1)
        t.exchange([(full(t.rank, 1), 1 - t.rank)], [(got, 1 - t.rank)]).wait()
        gather.wait()
        return everyone.tolist(), got.item()

    assert StrictWorld(2).run(work) == [([0, 1], 1), ([0, 1], 0)]


@pytest.mark.parametrize("of_ranks", [([1], [2]), ([2, 1], [2, 1])], ids=["differ", "decrease"])
def test_strict_refuses_keys_that_differ_or_do_not_increase(of_ranks):
    def work(t):
        for key in of_ranks[t.rank]:
            t.all_gather_async(torch.zeros(2), full(t.rank, 1), key=(key,)).wait()

    with pytest.raises(TransferError, match=r"same collective calls|order of their keys"):
        StrictWorld(2).run(work)
