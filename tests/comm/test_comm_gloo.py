"""Real gloo processes: what they move, and what they say when one of them dies, hangs or disagrees."""

import dataclasses
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nccl_options import NcclOptions
from testing import run_ranks

from lengthwise.comm import TorchTransport, World, agree, broadcast_bytes, join, torch_transport, world_from_environment
from lengthwise.comm import world as comm_world
from lengthwise.core.errors import DataError, PlanError, RankError, TransferError
from lengthwise.run import launch as launching
from lengthwise.run.launch import launch


@pytest.fixture(autouse=True)
def _no_process_left_behind():
    yield
    assert multiprocessing.active_children() == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_gloo_moves_messages_and_bytes_and_sums():
    big = bytes(range(250)) * 4000

    def work(t):
        got = [broadcast_bytes(t, data if t.rank == 0 else None) == data for data in (b"", big)]
        got.append(broadcast_bytes(t, b"from 2" if t.rank == 2 else None, source=2) == b"from 2")
        out, room = torch.full((2, 3), float(t.rank)), torch.empty(2, 3)
        t.exchange([(out, (t.rank + 1) % 3)], [(room, (t.rank - 1) % 3)]).wait()
        got.append(bool((room == (t.rank - 1) % 3).all()))
        t.exchange([], []).wait()
        total = torch.tensor([float(t.rank + 1)])
        t.all_reduce(total)
        piece, everyone = torch.empty(2), torch.empty(6)
        t.reduce_scatter(piece, torch.arange(6.0))
        t.all_gather(everyone, torch.full((2,), float(t.rank)))
        agree(t, b"plan", "plan")
        return all(got), total.item(), piece.tolist(), everyone.tolist()

    for rank, result in enumerate(run_ranks(work, 3)):
        assert result == (True, 6, [3 * 2 * rank, 3 * (2 * rank + 1)], [0, 0, 1, 1, 2, 2])


def overlapping(t):
    """Begin many collectives, wait for them from the last to the first; return whether all came out right."""
    many = range(12)
    pieces, everyone = [torch.empty(5) for _ in many], [torch.empty(9) for _ in many]
    sources = [torch.arange(15.0) * (n + 1) + t.rank for n in many]
    pending = [t.reduce_scatter_async(piece, source) for piece, source in zip(pieces, sources, strict=True)]
    del sources  # what is under way is kept for it
    pending += [t.all_gather_async(all_, torch.full((3,), t.rank + 10.0 * n)) for n, all_ in enumerate(everyone)]
    for each in reversed(pending):
        each.wait()
        each.wait()
    own = torch.arange(15.0)[5 * t.rank : 5 * t.rank + 5]
    summed = all(torch.equal(piece, 3 * (n + 1) * own + 3) for n, piece in enumerate(pieces))
    gathered = [torch.tensor([0.0, 1, 2]).repeat_interleave(3) + 10 * n for n in many]
    return summed and all(torch.equal(a, b) for a, b in zip(everyone, gathered, strict=True))


def test_gloo_has_many_collectives_under_way():
    assert run_ranks(overlapping, 3) == [True] * 3


def test_gloo_order_c_connects_all_edges_at_distance_1_and_2_at_start(monkeypatch):
    """Rule (c): before any ring, one grouped call over the transfer group names every neighbour up to distance 2."""
    calls, groups = [], []
    grouped, new_group = dist.batch_isend_irecv, dist.new_group
    monkeypatch.setattr(
        dist, "batch_isend_irecv", lambda ops: calls.append([(op.op.__name__, op.peer) for op in ops]) or grouped(ops)
    )
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: groups.append((a, k)) or new_group(*a, **k))

    def work(t):
        return calls, len(groups), [ranks for ranks, _ in groups]

    for rank, (made, num_groups, ranks) in enumerate(run_ranks(work, 5)):
        peers = [peer for peer in (rank - 2, rank - 1, rank + 1, rank + 2) if 0 <= peer < 5]
        assert [sorted(call) for call in made] == [sorted([(op, p) for p in peers for op in ("isend", "irecv")])]
        assert (num_groups, ranks) == (1, [()]), "one group for transfers, over all ranks, and no other"


class _Event:
    """A CUDA event of a stream that is the host itself."""

    def __init__(self, *, enable_timing=False):
        self.enable_timing = enable_timing

    def query(self):
        return bool(self.seconds)

    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        assert self.seconds

    def elapsed_time(self, later):
        assert self.enable_timing, "an event that is no clock"
        return (later.seconds - self.seconds) * 1e3


@pytest.fixture
def gpus_replaced(monkeypatch):
    """Take the path of NCCL with gloo in its place: groups, watch, waits of the stream, all but the device itself."""
    groups, new_group = [], dist.new_group

    def gloo_group(*, timeout, ranks=None, backend, device_id=None, pg_options=None):
        groups.append((backend, str(device_id), timeout.total_seconds(), pg_options))
        return new_group(timeout=timeout, backend="gloo")

    monkeypatch.setattr(World, "claim_device", lambda world: None)
    monkeypatch.setattr(comm_world, "gpu_of", str)
    monkeypatch.setattr(dist, "new_group", gloo_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    monkeypatch.setattr(torch_transport, "_zero", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch_transport, "lies_on_a_device", lambda tensor: tensor.dtype != torch.uint8)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return groups


def test_nccl_path_has_two_eager_groups_and_keeps_host_tensors_on_gloo(gpus_replaced, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def work(world, on_phase):
        t = TorchTransport(dataclasses.replace(world, gpus=3), timeout_seconds=7, on_phase=on_phase)
        agree(t, b"plan", "plan")
        out, room = torch.full((2, 3), float(t.rank)), torch.empty(2, 3)
        t.exchange([(out, (t.rank + 1) % 3)], [(room, (t.rank - 1) % 3)]).wait()
        total, piece, everyone = torch.tensor([float(t.rank + 1)]), torch.empty(2), torch.empty(6)
        t.all_reduce(total)
        t.reduce_scatter(piece, torch.arange(6.0))
        t.all_gather(everyone, torch.full((2,), float(t.rank)))
        t.broadcast(out, 1)
        assert overlapping(t)
        before = t.clock.waited_seconds
        if t.rank == 0:
            time.sleep(0.3)
        t.all_reduce(torch.zeros(1))
        waited = t.clock.waited_seconds - before
        before, slow = t.clock.waited_seconds, dist.batch_isend_irecv
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", lambda operations: time.sleep(0.3) or slow(operations))
            pending = t.exchange([(piece, (t.rank + 1) % 3)], [(torch.empty(2), (t.rank - 1) % 3)])
            assert t.clock.waited_seconds == before, "posting is no waiting: the GPU works on"
        pending.wait()
        with pytest.raises(PlanError, match="got 66"):
            t.exchange([(out, 0)] * 33, [(room, 0)] * 33)
        assert chosen == [torch.device("cuda", t.rank)], "by the thread of the watch"
        t.close()
        numbers = (total.item(), piece.tolist(), everyone.tolist(), room[0, 0].item(), out[0, 0].item())
        return t.rank, t.shares_gpus, numbers, gpus_replaced, waited > 0.2

    def told(world, on_phase):
        rank, shares, numbers, groups, late = work(world, on_phase)
        assert not shares
        assert numbers == (6, [6 * rank, 6 * rank + 3], [0, 0, 1, 1, 2, 2], (rank - 1) % 3, 1)
        longer = 7.0 + 24 * 3600  # NCCL counts from posting: a day more than our own time-out
        assert [group[:3] for group in groups] == [("nccl", f"cuda:{rank}", longer)] * 2
        (*_, ring), (*_, collectives) = groups
        found = [
            (each.is_high_priority_stream, each.config.max_ctas, each._timeout.total_seconds())
            for each in (ring, collectives)
        ]
        assert found == [(True, 8, longer), (False, 16, longer)]
        assert os.environ["NCCL_NCHANNELS_PER_NET_PEER"] == "4"
        assert late == (rank != 0), "waiting is what the stream waited"
        return True

    assert launch(told, 3)


@pytest.mark.exhaustive
def test_nccl_path_names_rank_and_phase_when_a_rank_stops_answering(gpus_replaced, capfd):
    def work(world, on_phase):
        t = TorchTransport(dataclasses.replace(world, gpus=2), timeout_seconds=1, on_phase=on_phase)
        t.phase = f"step 3 on {t.rank}"
        if t.rank == 1:
            time.sleep(60)
        pending = t.exchange([], [(torch.empty(4), 1)])
        t.phase = "much later"  # the host runs ahead of the GPU: it is the phase of the transfer that counts
        pending.wait()

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0, step 3 on 0, waiting for ranks 1: expected the rank to finish"):
        launch(work, 2)
    assert time.monotonic() - start < 30, "not the 60 s that the other rank sleeps"
    assert "error[transfer] rank 0, step 3 on 0: expected ranks 1 to answer within 1 s" in capfd.readouterr().err


def test_ranks_that_share_a_gpu_move_host_memory_only(gpus_replaced):
    def work(world, on_phase):
        t = TorchTransport(dataclasses.replace(world, gpus=2), timeout_seconds=10, on_phase=on_phase)
        t.close()
        return t.shares_gpus, gpus_replaced

    assert launch(work, 3) == (True, [("gloo", "None", 10.0, None)])


@pytest.mark.parametrize(
    ("seen", "ids", "expected"),
    [
        (1, ["a u0", "a u1", "a u2", "a u3"], (False, [1, 1, 1, 1])),  # one GPU shown to each process
        (1, ["a u0", "b u0", "c u0", "d u0"], (False, [1, 1, 1, 1])),  # NCCL_HOSTID: taken for machines
        (4, ["a u0", "a u1", "a u2", "a u3"], (False, [1, 1, 1, 1])),
        (2, ["a u0", "a u1", "a u0", "a u1"], (True, [2, 2, 2, 2])),
        (1, ["a u0", "a u0", "a u0", "b u0"], (True, [3, 3, 3, 1])),
    ],
)
def test_ranks_share_a_gpu_where_it_is_the_same_one(gpus_replaced, monkeypatch, seen, ids, expected):
    def work(world, on_phase):
        monkeypatch.setattr(comm_world, "gpu_of", lambda device: ids[world.rank])
        t = TorchTransport(dataclasses.replace(world, gpus=seen), timeout_seconds=10, on_phase=on_phase)
        numbers = torch.zeros(8)
        t.all_gather(numbers, torch.tensor([float(t.shares_gpus), float(t.device_ranks)]))
        t.close()
        return numbers.tolist()

    found = launch(work, 4)
    assert (set(found[::2]), found[1::2]) == ({float(expected[0])}, expected[1])


def test_ranks_of_torchrun_that_are_shown_one_gpu_each_take_it(monkeypatch):
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    world = world_from_environment()
    assert world is not None
    assert str(dataclasses.replace(world, gpus=1).device) == "cuda:0", "the only one it sees"
    assert str(dataclasses.replace(world, gpus=8).device) == "cuda:3"


def test_join_refuses_ranks_of_which_some_have_no_gpu(gpus_replaced):
    def work(world, on_phase):
        join(dataclasses.replace(world, gpus=0 if world.rank else 2), timeout_seconds=10, on_phase=on_phase)

    with pytest.raises(RankError, match="1 of 2 on a GPU; this one is"):
        launch(work, 2)


def test_gloo_names_rank_and_phase_when_a_peer_dies():
    def work(t):
        t.phase = "step 7, microbatch 1 forward"
        if t.rank == 1:
            os._exit(0)  # says nothing: the parent must find out, the peer must not wait for ever
        t.exchange([], [(torch.empty(4), 1)]).wait()

    def told(t):
        try:
            work(t)
        except TransferError as error:
            raise DataError("told", expected="", got=str(error), remedy="") from None  # comes first: not a transfer's

    start = time.monotonic()
    with pytest.raises((RankError, DataError)) as raised:
        run_ranks(told, 2, timeout_seconds=10)
    assert time.monotonic() - start < 8, "a dead peer is found before the time-out"
    assert "rank 0, step 7, microbatch 1 forward" in str(raised.value)
    assert "ranks 1" in str(raised.value)


def test_gloo_names_rank_and_phase_when_a_rank_stops_answering(monkeypatch):
    monkeypatch.setattr(launching, "_GRACE_SECONDS", 1.0)

    def work(t):
        t.phase = f"step 3 on {t.rank}"
        if t.rank == 1:
            time.sleep(60)
        t.exchange([], [(torch.empty(4), 1)]).wait()

    start = time.monotonic()
    with pytest.raises(TransferError, match="rank 0, step 3 on 0: expected ranks 1 to answer within 1 s"):
        run_ranks(work, 2, timeout_seconds=1.0)
    assert time.monotonic() - start < 1 + 5


@pytest.mark.exhaustive
def test_gloo_collective_under_way_names_the_phase_it_was_posted_in():
    def work(t):
        t.phase = "step 3, end"
        if t.rank == 1:
            time.sleep(60)
        pending = t.all_gather_async(torch.zeros(2), torch.zeros(1))
        t.phase = "step 4"
        pending.wait()

    with pytest.raises(TransferError, match="rank 0, step 3, end: expected all ranks to answer within 1 s"):
        run_ranks(work, 2, timeout_seconds=1.0)


def test_launch_returns_the_result_of_rank_0():
    assert launch(lambda world, _: (world.rank, world.world_size), 1) == (0, 1)
    assert launch(lambda world, _: (world.rank, world.world_size, world.local_rank), 3) == (0, 3, 0)


def test_launch_raises_the_reason_and_not_its_consequences():
    def work(t):
        t.phase = "reading"
        if t.rank == 2:
            time.sleep(0.3)
            raise DataError("train.jsonl:3", expected="ids", got="text", remedy="Mend it.")
        t.exchange([], [(torch.empty(4), 2)]).wait()

    with pytest.raises(DataError, match=r"train.jsonl:3"):
        run_ranks(work, 3, timeout_seconds=10)


def test_launch_says_what_a_rank_raised_that_is_no_error_of_ours(capfd):
    def work(world, on_phase):
        on_phase("loading")
        if world.rank == 1:
            raise ZeroDivisionError("oops")
        time.sleep(0.05)

    with pytest.raises(RankError, match=r"rank 1, loading.*ZeroDivisionError: oops"):
        launch(work, 2)
    assert "Traceback" in capfd.readouterr().err


def test_launch_names_a_killed_rank_and_its_last_phase():
    def work(t):
        t.phase = f"step 12, microbatch {t.rank} of 3 backward"
        if t.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        t.exchange([], [(torch.empty(4), 1)]).wait()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1, step 12, microbatch 1 of 3 backward.*SIGKILL"):
        run_ranks(work, 3, timeout_seconds=30)
    assert time.monotonic() - start < 8


def test_launch_ends_ranks_that_do_not_listen(monkeypatch):
    """A rank in a busy loop that ignores signals is ended once another has failed."""
    monkeypatch.setattr(launching, "_GRACE_SECONDS", 0.5)

    def work(world, _):
        if world.rank == 0:
            raise DataError("row 1", expected="x", got="y", remedy="z")
        while True:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(0.05)

    start = time.monotonic()
    with pytest.raises(DataError, match="row 1"):
        launch(work, 2)
    assert time.monotonic() - start < 6


def test_launch_tells_of_a_result_that_cannot_be_sent(capfd):
    with pytest.raises(RankError, match="rank 0"):
        launch(lambda world, _: (lambda: None) if world.rank == 0 else None, 2)


def test_transport_leaves_its_world_on_close():
    def work(t):
        assert isinstance(t, TorchTransport)
        t.all_reduce(torch.ones(3))
        t.close()
        threads = {each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")}
        return dist.is_initialized(), {each for each in threads if "gloo" in each}

    # A thread of gloo's that is left aborts the process, where it lets go of a tensor while Python ends.
    assert run_ranks(work, 2) == [(False, set()), (False, set())]
