"""Moves tensors between ranks: grouped transfers for rings, and the collectives of the step's end.

`join` makes a `Transport`, the one interface. No sequence has a communicator of its own: there is one global group for
collectives and one for transfers; pipeline stages add one for messages between stages and one for the replicas of a
stage (`Mesh`).
"""

from lengthwise.comm.devices import built_for_gpus, count_gpus, find_gpus, has_unused_gpu
from lengthwise.comm.exchange import (
    agree,
    broadcast_bytes,
    from_first,
    on_first_rank,
    raise_together,
    share_first,
    share_names,
    share_numbers,
)
from lengthwise.comm.mesh import Mesh
from lengthwise.comm.solo import Lone, SoloTransport
from lengthwise.comm.torch_transport import TorchTransport, join
from lengthwise.comm.transport import Done, Pending, Transport
from lengthwise.comm.world import World, session_world, world_from_environment

__all__ = [
    "Done",
    "Lone",
    "Mesh",
    "Pending",
    "SoloTransport",
    "TorchTransport",
    "Transport",
    "World",
    "agree",
    "broadcast_bytes",
    "built_for_gpus",
    "count_gpus",
    "find_gpus",
    "from_first",
    "has_unused_gpu",
    "join",
    "on_first_rank",
    "raise_together",
    "session_world",
    "share_first",
    "share_names",
    "share_numbers",
    "world_from_environment",
]
