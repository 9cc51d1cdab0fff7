"""Messages over real gloo that are not what their receiver expects: refused by name, before any of them is taken."""

import pytest
import torch
from testing.ranks import fork_ranks

from lengthwise.comm import World, join
from lengthwise.comm.torch_transport import WRAPPER
from lengthwise.core.errors import ConfigError, RankError
from tiers import more

pytestmark = pytest.mark.usefixtures("checked_transfers")


def ran(work, ranks=2, *, timeout_seconds=20.0):
    def rank_main(world: World):
        t = join(world, timeout_seconds=timeout_seconds)
        result = work(t)
        t.close()
        return result

    return fork_ranks(rank_main, ranks)[0]


def refused(send, receive):
    """Let rank 0 send what `send` posts and rank 1 receive what `receive` posts; return the error, and what came."""

    def work(t):
        t.phase = "step 1"
        (send if t.rank == 0 else receive)(t)

    with pytest.raises(RankError) as caught:
        ran(work)
    return str(caught.value)


def floats(*shape, value=1.0, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


@pytest.mark.parametrize(
    ("sent", "got"),
    [(floats(5), "float32 of shape [5]"), more(floats(4, dtype=torch.int32), "int32 of shape [4]")],
    ids=["length", "another dtype of as many bytes"],
)
def test_a_wrong_length_or_dtype_is_refused(sent, got):
    """Of the second message; and none is taken."""
    rooms = [floats(3, value=-1), floats(4, value=-1)]

    def receive(t):
        try:
            t.exchange([], [(room, 0) for room in rooms]).wait()
        finally:
            assert all((room == -1).all() for room in rooms)

    said = refused(lambda t: t.exchange([(floats(3), 1), (sent, 1)], []).wait(), receive)
    assert "rank 1, step 1: expected from rank 0 to rank 1: message 2, float32 of shape [4]" in said
    assert f"got message 2, {got}, of step 1" in said


def post_in(t, *phases):
    """Send or receive a message of the same size in each of these phases."""
    pending = []
    for phase in phases:
        t.phase = phase
        message = [(floats(4), 1 - t.rank)]
        pending.append(t.exchange(message, []) if t.rank == 0 else t.exchange([], message))
    for each in pending:
        each.wait()


def test_a_lost_message_is_found_at_the_next_one():
    said = refused(lambda t: post_in(t, "step 1", "step 3"), lambda t: post_in(t, "step 1", "step 2", "step 3"))
    assert "message 2, float32 of shape [4], of step 2; got message 2, float32 of shape [4], of step 3" in said


def test_ranks_that_have_not_met_exchange_nothing():
    def work(t):
        if t.rank not in (0, 3):
            return
        came, peer = floats(4, value=-1), 3 - t.rank
        call = [(floats(4), peer)], [(came, peer)]
        with pytest.raises(RankError, match=rf"that it has met: .*; got one with \[{peer}\]"):
            t.exchange(*call)
        t.connect([peer])
        t.exchange(*call).wait()
        assert (came == 1).all()

    ran(work, 4)


@pytest.mark.parametrize("asked", ["yes", "testing.checked:nothing"])
def test_a_wrapper_that_is_not_there_is_refused_by_name(monkeypatch, asked):
    monkeypatch.setenv(WRAPPER, asked)
    with pytest.raises(ConfigError, match=f"{WRAPPER}: expected module:name that can be imported; got '{asked}'"):
        join(World(rank=0, world_size=2), timeout_seconds=1)


def test_ranks_at_different_collectives_are_refused():
    def work(t):
        t.phase = "step 1"
        t.all_gather_async(torch.empty(8), floats(4), key=(1, "gather of layer 0")).wait()
        kind = "gather" if t.rank == 0 else "reduce"
        t.all_gather_async(torch.empty(8), floats(4), key=(1, f"{kind} of layer 1")).wait()

    with pytest.raises(RankError, match=r"rank \d, step 1: .*same collective.* of layer 1"):
        ran(work)
