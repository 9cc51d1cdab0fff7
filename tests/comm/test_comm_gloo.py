"""Real gloo processes: what they move, and what they say when one of them dies, hangs or disagrees."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from testing import run_ranks
from testing.collectives import check_collectives, pass_around
from testing.ranks import fork_ranks
from testing.strict import StrictWorld

from lengthwise.comm import Mesh, TorchTransport, World, agree, broadcast_bytes, join, torch_transport
from lengthwise.comm import world as comm_world
from lengthwise.comm.groups import DEFAULTS, nccl_options, set_defaults
from lengthwise.core.errors import ConfigError, DataError, PlanError, RankError, TransferError
from lengthwise.run import launch as launching

CPU = torch.device("cpu")


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
        t.exchange([], []).wait()
        agree(t, b"plan", "plan")
        pass_around(t, CPU)
        check_collectives(t, CPU)
        return all(got)

    assert run_ranks(work, 3) == [True] * 3


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

    for rank, (made, num_groups, ranks) in enumerate(run_ranks(work, 4)):
        peers = [peer for peer in (rank - 2, rank - 1, rank + 1, rank + 2) if 0 <= peer < 4]
        assert [sorted(call) for call in made] == [sorted([(op, p) for p in peers for op in ("isend", "irecv")])]
        assert (num_groups, ranks) == (1, [(None,)]), "one group for transfers, over all ranks, and no other"


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


class NcclOptions:
    """What `dist.ProcessGroupNCCL.Options` takes and has (torch 2.11 to 2.13); CPU builds have none."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=-1, cga_cluster_size=-1, min_ctas=-1, max_ctas=-1)


@pytest.fixture
def gpus_replaced(monkeypatch):
    """Take the path of NCCL with gloo in its place: groups, watch, waits of the stream, all but the device itself."""
    groups, new_group = [], dist.new_group

    def gloo_group(ranks, *, timeout, backend, device_id=None, pg_options=None, use_local_synchronization=False):
        groups.append((backend, str(device_id), timeout.total_seconds(), pg_options))
        return new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=use_local_synchronization)

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

    def work(world):
        t = TorchTransport(dataclasses.replace(world, gpus=3), timeout_seconds=7)
        agree(t, b"plan", "plan")
        assert not t.shares_gpus
        pass_around(t, CPU)
        check_collectives(t, CPU)
        before = t.clock.waited_seconds
        if t.rank == 0:
            time.sleep(0.3)
        t.all_reduce(torch.zeros(1))
        late = t.clock.waited_seconds - before > 0.2
        assert late == (t.rank != 0), "waiting is what the stream waited"
        before, slow, piece = t.clock.waited_seconds, dist.batch_isend_irecv, torch.empty(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", lambda operations: time.sleep(0.3) or slow(operations))
            pending = t.exchange([(piece, (t.rank + 1) % 3)], [(torch.empty(2), (t.rank - 1) % 3)])
            assert t.clock.waited_seconds == before, "posting is no waiting: the GPU works on"
        pending.wait()
        with pytest.raises(PlanError, match="got 66"):
            t.exchange([(piece, 0)] * 33, [(piece, 0)] * 33)
        assert chosen == [torch.device("cuda", t.rank)], "by the thread of the watch"
        t.close()
        longer = 7.0 + 24 * 3600  # NCCL counts from posting: a day more than our own time-out
        assert [group[:3] for group in gpus_replaced] == [("nccl", f"cuda:{t.rank}", longer)] * 2
        options = [each for *_, each in gpus_replaced]  # of rings, and of collectives
        assert [(each.is_high_priority_stream, each.config.max_ctas) for each in options] == [(True, 8), (False, 16)]
        assert {each._timeout.total_seconds() for each in options} == {longer}
        assert os.environ["NCCL_NCHANNELS_PER_NET_PEER"] == "4"
        return True

    assert all(fork_ranks(work, 3))


def test_what_the_environment_asks_nccl_for_is_left():
    options = nccl_options(timedelta(seconds=3), NcclOptions, {"NCCL_MIN_CTAS": "16"}, for_transfers=True)
    assert (options.is_high_priority_stream, options.config.max_ctas) == (True, -1)
    environment = {"NCCL_NCHANNELS_PER_NET_PEER": "2", "PATH": "/bin"}
    set_defaults(environment)
    assert environment == {**DEFAULTS, "NCCL_NCHANNELS_PER_NET_PEER": "2", "PATH": "/bin"}


def test_ranks_that_share_a_gpu_are_refused_and_one_that_is_shown_is_the_first(gpus_replaced):
    def joins(world):
        world = dataclasses.replace(world, gpus=1)
        with pytest.raises(ConfigError, match="a GPU for each rank, as NCCL needs; got a GPU of several"):
            join(world, timeout_seconds=10)

    fork_ranks(joins, 2)
    alone = World(rank=3, world_size=8, local_rank=3, local_size=8, gpus=1)
    assert str(alone.device) == "cuda:0", "the only one that it is shown"
    assert str(dataclasses.replace(alone, gpus=8).device) == "cuda:3"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["a u0", "a u1", "b u0"], (False, [1, 1, 1])),  # one GPU shown to each process
        (["a u0", "a u0", "b u0"], (True, [2, 2, 1])),
    ],
)
def test_ranks_share_a_gpu_where_it_is_the_same_one(gpus_replaced, monkeypatch, ids, expected):
    def work(world):
        monkeypatch.setattr(comm_world, "gpu_of", lambda device: ids[world.rank])
        t = TorchTransport(dataclasses.replace(world, gpus=1), timeout_seconds=10)
        numbers = torch.zeros(6)
        t.all_gather(numbers, torch.tensor([float(t.shares_gpus), float(t.device_ranks)]))
        t.close()
        return numbers.tolist()

    for found in fork_ranks(work, 3):
        assert (set(found[::2]), found[1::2]) == ({float(expected[0])}, expected[1])


def test_join_refuses_ranks_of_which_some_have_no_gpu(gpus_replaced):
    def work(world):
        join(dataclasses.replace(world, gpus=0 if world.rank else 2), timeout_seconds=10)

    with pytest.raises(RankError, match="1 of 2 on a GPU; this one is"):
        fork_ranks(work, 2)


@pytest.mark.parametrize(
    ("ends", "timeout_seconds", "said"),
    [
        # The parent must find out, the peer must not wait for ever.
        (lambda: os._exit(0), 10.0, r"rank 0, step 3, end.*ranks 1"),
        (lambda: time.sleep(60), 1.0, "rank 0, step 3, end: expected ranks 1 to answer within 1 s"),
    ],
    ids=["dies", "stops answering"],
)
def test_gloo_names_rank_and_the_phase_of_posting_when_a_peer_is_gone(ends, timeout_seconds, said):
    def work(t):
        t.phase = "step 3, end"
        if t.rank == 1:
            ends()
        try:
            pending = t.exchange([], [(torch.empty(2), 1)])
            t.phase = "step 4"
            pending.wait()
        except TransferError as error:
            raise DataError("told", expected="", got=str(error), remedy="") from None  # comes first: not a transfer's

    start = time.monotonic()
    with pytest.raises((RankError, DataError), match=said):
        run_ranks(work, 2, timeout_seconds=timeout_seconds)
    assert time.monotonic() - start < 8, "a dead peer is found before the time-out"


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
        launching.on_ranks(work, 2)
    assert time.monotonic() - start < 6


def gloo_threads():
    names = set()
    for each in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.add(each.read_text().strip())
    return {each for each in names if "gloo" in each}


def test_transport_leaves_its_world_on_close():
    def work(t):
        assert isinstance(t, TorchTransport)
        t.all_reduce(torch.ones(3))
        t.close()
        end = time.monotonic() + 10  # the kernel lists a thread for a moment after it was joined
        while (left := gloo_threads()) and time.monotonic() < end:
            time.sleep(0.01)
        return dist.is_initialized(), left

    # A thread of gloo's that is left aborts the process, where it lets go of a tensor while Python ends.
    assert run_ranks(work, 2) == [(False, set()), (False, set())]


def test_join_says_which_transport_and_why():
    def work(world):
        said = []
        join(world, timeout_seconds=30, say=said.append).close()
        return said

    assert fork_ranks(work, 2) == [["transfers: gloo; because the run computes on the CPU"]] * 2


def test_a_rank_that_nobody_meets_says_so(tmp_path):
    alone = World(rank=0, world_size=2, local_rank=0, local_size=2, rendezvous=tmp_path / "ranks", gpus=0)
    with pytest.raises(TransferError, match="rank 0, start: expected all ranks to answer within 1 s"):
        join(alone, timeout_seconds=1.0)


def work(world):
    """Return what each collective along the replicas gives, and what came from the replica before."""
    mesh = Mesh(world, 2)
    own, size = torch.full((3,), float(world.rank)), mesh.num_replicas
    total, gathered, part, first = own.clone(), torch.empty(3 * size), torch.empty(1), own.clone()
    mesh.replicas.all_reduce(total)
    mesh.replicas.all_gather(gathered, own)
    mesh.replicas.reduce_scatter(part, torch.arange(size, dtype=torch.float32) + world.rank)
    mesh.replicas.broadcast(first, 1)
    came = torch.empty(3)
    after, before = (mesh.replica + 1) % size, (mesh.replica - 1) % size
    mesh.replicas.exchange([(own, after)], [(came, before)]).wait()
    other = torch.empty(3)
    mesh.between.exchange(*([(each, mesh.rank_of_stage(1 - mesh.stage))] for each in (own, other))).wait()
    everyone = torch.ones(1)
    world.all_reduce(everyone)
    return [each.tolist() for each in (total, gathered, part, first, came, other, everyone)]


def expected(rank):
    stage, replica = rank % 2, rank // 2
    ranks = [stage, 2 + stage, 4 + stage]
    return [
        [float(sum(ranks))] * 3,
        [float(each) for each in ranks for _ in range(3)],
        [float(3 * replica + sum(ranks))],
        [float(ranks[1])] * 3,
        [float(ranks[(replica - 1) % 3])] * 3,
        [float(rank - stage + (1 - stage))] * 3,
        [6.0],
    ]


@pytest.mark.parametrize("run", [run_ranks, lambda work, ranks: StrictWorld(ranks).run(work)], ids=["gloo", "strict"])
def test_a_stages_replicas_are_a_world_of_their_own(run):
    assert run(work, 6) == [expected(rank) for rank in range(6)]
