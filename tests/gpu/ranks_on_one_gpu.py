"""Every call of the transport between ranks of their own processes, which NCCL takes for machines on one GPU.

    python tests/gpu/ranks_on_one_gpu.py RANKS DEVICE

NCCL lets a world of one send to itself, and takes ranks with another NCCL_HOSTID for ranks of another machine; its
makers do not support two on one GPU, which is good enough for checks and says nothing of speed. On the CPU the same
goes over gloo, which cannot send to itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from testing.ranks import fork_ranks
from torch import Tensor

from lengthwise.comm import TorchTransport, World
from lengthwise.core.environment import prepare_environment

NCCL_OF_ONE_MACHINE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
NUM_ELEMENTS, NUM_HOPS = 1 << 16, 4


def check_transport(world: World) -> str:
    """Run every call on this rank; return what was checked, in a line."""
    os.environ.update(NCCL_OF_ONE_MACHINE, NCCL_HOSTID=f"rank{world.rank}")
    transport = TorchTransport(world, timeout_seconds=20)
    assert not transport.shares_gpus, "by NCCL_HOSTID each rank is a machine"
    interval = transport.clock.start(world.device)
    if world.world_size > 1 or world.gpus:
        for dtype in (torch.float32, torch.bfloat16):
            pass_around(transport, world.device, dtype)
    check_collectives(transport, world.device)
    spent = interval.stop()
    assert 0 <= spent.waited_seconds <= spent.seconds * 1.01, spent
    transport.close()
    how = f"NCCL {torch.cuda.nccl.version()}" if world.gpus else "gloo"
    return f"{how}: ranks {world.world_size}, waited {spent.waited_seconds:.4f} of {spent.seconds:.4f} s"


def pass_around(transport: TorchTransport, device: torch.device, dtype: torch.dtype) -> None:
    """Send from each rank to the next, some work under way, and compare what comes."""
    rank, ranks = transport.rank, transport.world_size
    for hop in range(NUM_HOPS):
        transport.phase = f"{dtype}, hop {hop}"
        sent, room = (_full(value, device, dtype) for value in (rank + hop, -1))
        pending = transport.exchange([(sent, (rank + 1) % ranks)], [(room, (rank - 1) % ranks)])
        some = torch.randn(512, 512, device=device)
        some @ some
        pending.wait()
        assert bool((room == float((rank - 1) % ranks + hop)).all()), (dtype, hop, room[:3])


def check_collectives(transport: TorchTransport, device: torch.device) -> None:
    """Call every collective, some of them under way at once, and compare."""
    rank, ranks = transport.rank, transport.world_size
    transport.phase = "collectives"
    total = _full(1, device)
    transport.all_reduce(total)
    assert bool((total == ranks).all())
    pieces, everyone = ([torch.empty(size, device=device) for _ in range(6)] for size in (2, 2 * ranks))
    sources = [torch.arange(2.0 * ranks, device=device) + n for n in range(6)]
    pending = [transport.reduce_scatter_async(*each) for each in zip(pieces, sources, strict=True)]
    pending += [transport.all_gather_async(all_, source[:2]) for all_, source in zip(everyone, sources, strict=True)]
    for each in pending:
        each.wait()
    for n, (piece, all_) in enumerate(zip(pieces, everyone, strict=True)):
        assert piece.tolist() == [ranks * (2.0 * rank + n), ranks * (2.0 * rank + 1 + n)]
        assert all_.tolist() == [float(n), 1.0 + n] * ranks
    last = _full(rank, device)
    transport.broadcast(last, ranks - 1)
    assert bool((last == ranks - 1).all())


def _full(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((NUM_ELEMENTS,), float(value), device=device, dtype=dtype)


def main() -> None:
    """Run the ranks that the command line asks for."""
    ranks, gpus = int(sys.argv[1]), int(sys.argv[2] == "cuda")
    prepare_environment()
    if ranks > 1:
        print(fork_ranks(check_transport, ranks, gpus=gpus)[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        print(check_transport(World(rank=0, world_size=1, gpus=gpus, rendezvous=Path(folder) / "ranks")))


if __name__ == "__main__":
    main()
