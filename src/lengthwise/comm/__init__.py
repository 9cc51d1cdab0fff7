"""Moves tensors between ranks: grouped transfers for rings, and the collectives of the step's end.

`join` makes a `Transport`, the one interface. No sequence has a communicator of its own: there is one global group for
collectives and one for transfers; pipeline stages add one for messages between stages and one for the replicas of a
stage (`Mesh`).
"""

from lengthwise.comm.devices import built_for_gpus as built_for_gpus
from lengthwise.comm.devices import count_gpus as count_gpus
from lengthwise.comm.devices import find_gpus as find_gpus
from lengthwise.comm.devices import has_unused_gpu as has_unused_gpu
from lengthwise.comm.exchange import agree as agree
from lengthwise.comm.exchange import broadcast_bytes as broadcast_bytes
from lengthwise.comm.exchange import from_first as from_first
from lengthwise.comm.exchange import on_first_rank as on_first_rank
from lengthwise.comm.exchange import raise_together as raise_together
from lengthwise.comm.exchange import share_first as share_first
from lengthwise.comm.exchange import share_names as share_names
from lengthwise.comm.exchange import share_numbers as share_numbers
from lengthwise.comm.mesh import Mesh as Mesh
from lengthwise.comm.solo import Lone as Lone
from lengthwise.comm.solo import SoloTransport as SoloTransport
from lengthwise.comm.torch_transport import TorchTransport as TorchTransport
from lengthwise.comm.torch_transport import join as join
from lengthwise.comm.transport import Done as Done
from lengthwise.comm.transport import Pending as Pending
from lengthwise.comm.transport import Transport as Transport
from lengthwise.comm.world import World as World
from lengthwise.comm.world import session_world as session_world
from lengthwise.comm.world import world_from_environment as world_from_environment
