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
from testing.collectives import check_collectives, pass_around
from testing.ranks import fork_ranks

from lengthwise.comm import TorchTransport, World
from lengthwise.core.environment import prepare_environment

NCCL_OF_ONE_MACHINE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


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
