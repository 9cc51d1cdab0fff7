"""Chooses the transport of a run."""

from __future__ import annotations

from collections.abc import Callable

from lengthwise.comm.solo import SoloTransport
from lengthwise.comm.staged import StagedTransport
from lengthwise.comm.torch_transport import TorchTransport
from lengthwise.comm.transport import Transport
from lengthwise.comm.world import World


def join(
    world: World,
    *,
    timeout_seconds: float,
    on_phase: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Transport:
    """Claim the rank's device, join the other ranks, and return the transport between them; `say` hears which.

    Raises:
        TransferError: not all ranks came.
        RankError: some are on GPUs and some are not.
    """
    if world.world_size == 1:
        world.claim_device()
        return SoloTransport()
    transport = TorchTransport(world, timeout_seconds=timeout_seconds, on_phase=on_phase)
    if say is not None:
        say(f"transfers: {_described(world, transport)}")
    return StagedTransport(transport) if transport.shares_gpus else transport


def _described(world: World, transport: TorchTransport) -> str:
    if transport.shares_gpus:
        return "through host memory and gloo; because ranks share a GPU, and NCCL takes one rank a device"
    return "NCCL; because each rank has a GPU of its own" if world.gpus else "gloo; because the run computes on the CPU"
