"""The transport of a run: torch.distributed, with gloo for host memory and NCCL beside it for GPUs.

Transfers are grouped `batch_isend_irecv` calls only (on NCCL a bare isend makes a communicator for each pair), in a
group of their own. Edges of rings are connected at the start, others before the first step that needs them
(`program.far_peers`). Host tensors use gloo on GPUs, too (docs/decisions/two-groups-on-gpus.md).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.comm.clock import Clock
from lengthwise.comm.groups import gloo_group, gloo_groups, nccl_group, refuse_large
from lengthwise.comm.solo import SoloTransport
from lengthwise.comm.transfer_watch import Posted, TransferWatch
from lengthwise.comm.transport import Done, Key, Message, Pending, Transport, lies_on_a_device
from lengthwise.comm.world import World
from lengthwise.core.errors import ConfigError, TransferError
from lengthwise.program import line_peers

Result = TypeVar("Result")
WRAPPER = "LENGTHWISE_TRANSPORT_WRAPPER"


def join(
    world: World,
    *,
    timeout_seconds: float,
    on_phase: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Transport:
    """Claim the rank's device, join the other ranks, and return the transport.

    say: function that is called with the kind of transport. Raises TransferError if some ranks do not come, RankError
    if some are on GPUs and some are not, ConfigError if ranks share a GPU and no wrapper is set.
    """
    if world.world_size == 1:
        world.claim_device()
        return SoloTransport()
    wrap = transport_wrapper()
    transport = TorchTransport(world, timeout_seconds=timeout_seconds, on_phase=on_phase)
    if say is not None:
        say(f"transfers: {_means(world, transport.shares_gpus)}{'' if wrap is None else f', in {os.environ[WRAPPER]}'}")
    if wrap is None and transport.shares_gpus:
        remedy = "Start as many ranks as there are GPUs, or give each rank a GPU of its own."
        raise ConfigError("ranks", expected="a GPU for each rank, as NCCL needs", got="a GPU of several", remedy=remedy)
    return transport if wrap is None else wrap(transport, transport)


def transport_wrapper() -> Callable[[Transport, TorchTransport], Transport] | None:
    """Return the wrapper that LENGTHWISE_TRANSPORT_WRAPPER names as `module:name`, or None.

    It is called with the transport and the world below it. Tests set it to `testing.checked` in each process of a run.
    """
    setting = os.environ.get(WRAPPER, "")
    module, _, name = setting.partition(":")
    try:
        return getattr(import_module(module), name) if setting else None
    except (ImportError, AttributeError, ValueError) as error:
        got, remedy = f"{setting!r} ({error})", f"Unset {WRAPPER}."
        raise ConfigError(WRAPPER, expected="module:name that can be imported", got=got, remedy=remedy) from None


def _means(world: World, sharing: bool) -> str:
    if sharing:
        return "through host memory and gloo; because ranks share a GPU, and NCCL takes one rank per device"
    return "NCCL; because each rank has a GPU of its own" if world.gpus else "gloo; because the run computes on the CPU"


_HOST, _TRANSFERS, _GPUS = "host", "transfers", "gpus"  # groups: collectives on host, transfers, collectives on GPUs


class TorchTransport:
    """The ranks of a torch.distributed world; if they share a GPU, tests wrap it (`testing/staged.py`)."""

    def __init__(
        self, world: World, *, timeout_seconds: float = 600.0, on_phase: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.world_size = world.rank, world.world_size
        self.clock = Clock()
        self._on_phase = on_phase
        self.phase = "start"
        self._timeout_seconds = timeout_seconds
        timeout, self._everyone = timedelta(seconds=timeout_seconds), "all ranks"
        met = self._guard(lambda: world.connect(timeout))
        self.shares_gpus, self.device_ranks = met.shares_gpus, met.device_ranks
        self._groups, self._owned = {_HOST: met.host}, met.owned
        self._device = torch.device("cpu") if self.shares_gpus else world.device
        self._watch = None
        self._groups[_TRANSFERS] = self._make_transfers()
        if self._device.type != "cpu":
            make = partial(nccl_group, timeout, self._device, for_transfers=False)
            self._groups[_GPUS] = self._guard(make)
            # A new thread uses GPU 0, whatever its process uses.
            self._watch = TransferWatch(
                timeout_seconds, self._give_up, begin=partial(torch.cuda.set_device, self._device), ends_frozen=True
            )
        self._connected: set[int] = set()
        self.connect(line_peers(self.rank, self.world_size))

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self._on_phase is not None:
            self._on_phase(phase)

    def _make_transfers(self) -> dist.ProcessGroup:
        timeout, is_on_gpus = timedelta(seconds=self._timeout_seconds), self._device.type != "cpu"
        make = partial(nccl_group, timeout, self._device, for_transfers=True)
        group = self._guard(make if is_on_gpus else partial(gloo_group, timeout))
        # One collective before the first transfer: NCCL wants all ranks in the first call of a communicator.
        self._guard(lambda: dist.all_reduce(_zero(self._device), group=group))
        return group

    def connect(self, peers: Sequence[int]) -> None:
        """Exchange one number with each new rank of `peers`; on NCCL this makes the connection."""
        new = [peer for peer in peers if peer not in self._connected]
        self._connected.update(new)
        self.exchange(*([(_zero(self._device), peer) for peer in new] for _ in range(2))).wait()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._exchange(_TRANSFERS, sends, receives)

    def beside(self) -> Callable[[Sequence[Message], Sequence[Message]], Pending]:
        """Return a function that exchanges host tensors over a new group of its own. Collective."""
        name = f"beside {len(self._groups)}"
        self._groups[name] = self._guard(lambda: gloo_group(timedelta(seconds=self._timeout_seconds)))
        return partial(self._exchange, name)

    def _exchange(self, name: str, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        group = self._groups[name]
        if self._watch is not None and name == _TRANSFERS:
            refuse_large(len(sends) + len(receives), where=f"rank {self.rank}, {self.phase}")
        operations = [dist.P2POp(dist.isend, tensor, peer, group=group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer, group=group) for tensor, peer in receives]
        peers = sorted({peer for _, peer in (*sends, *receives)})
        if not operations:
            return Done()
        tensors = [tensor for tensor, _ in (*sends, *receives)]
        return self._post(lambda: dist.batch_isend_irecv(operations), peers, tensors)

    def all_reduce(self, tensor: Tensor) -> None:
        self._collective(partial(dist.all_reduce, tensor), tensor).wait()

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        self.reduce_scatter_async(output, source).wait()

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return self._collective(partial(_reduce_scatter, output, source), output, source, key=key)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self.all_gather_async(output, source).wait()

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return self._collective(partial(_all_gather, output, source), output, source, key=key)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._collective(partial(dist.broadcast, tensor, group_src=source), tensor).wait()

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        own, timeout = next(ranks for ranks in groups if self.rank in ranks), timedelta(seconds=self._timeout_seconds)
        how: dict[str, Any] = {"groups": groups, "is_owned": self._owned}
        made = {_HOST: self._guard(lambda: gloo_groups(timeout, **how), own)}
        if _GPUS in self._groups:
            make = partial(nccl_group, timeout, self._device, for_transfers=False, **how)
            made[_GPUS] = self._guard(make, own)
        for name, group in made.items():
            self._groups[f"{name} among {own}"] = group  # for `close`
        return _Among(self, own, made)

    def apart(self) -> Transport:
        group = self._groups[f"transfers {len(self._groups)}"] = self._make_transfers()
        return _Among(self, range(self.world_size), {**self._groups, _TRANSFERS: group})

    def close(self) -> None:
        """Leave the world (torch warns at exit otherwise), or, in a user's world, only our groups."""
        if self._watch is not None:
            torch.cuda.synchronize(self._device)
            self._watch.close()
        if dist.is_initialized() and self._groups:
            for group in [None] if self._owned else self._groups.values():
                dist.destroy_process_group(group)
        # Gloo's threads end with the last reference to their group. A thread that frees a tensor while Python exits
        # aborts the process.
        self._groups.clear()

    def _collective(
        self, call: Callable[..., dist.Work | None], tensor: Tensor, *others: Tensor, key: Key | None = None
    ) -> Pending:
        group = self._groups[_GPUS if _GPUS in self._groups and lies_on_a_device(tensor) else _HOST]

        def works() -> list[dist.Work]:
            work = call(group=group, async_op=True)
            assert work is not None, "every rank is a member of a group of all ranks"
            return [work]

        return self._post(works, None, [tensor, *others], key)

    def _post(
        self,
        call: Callable[[], Sequence[dist.Work]],
        peers: Sequence[int] | None,
        alive: Sequence[Tensor],
        key: Key | None = None,
    ) -> Pending:
        phase = self.phase if key is None else f"{self.phase}, {key}"
        on_stream = self._watch is not None and any(map(lies_on_a_device, alive))
        # While the host posts to a GPU, the GPU works; gloo sends some bytes while it posts.
        with nullcontext() if on_stream else self.clock.waiting(in_collective=peers is None):
            works = self._guard(call, peers, phase=phase)
        if self._watch is not None and on_stream:
            reached = torch.cuda.Event()
            reached.record()
            self._watch.add(works, reached=reached, phase=phase, others=self._named(peers))
        return _TorchPending(transport=self, works=works, peers=peers, phase=phase, alive=alive, on_stream=on_stream)

    def _guard(
        self, call: Callable[[], Result], peers: Sequence[int] | None = None, *, phase: str | None = None
    ) -> Result:
        try:
            return call()
        except (RuntimeError, ValueError) as error:  # DistBackendError is a RuntimeError
            got = _without_place(str(error))
            raise self._transfer_error(phase or self.phase, self._named(peers), got) from error

    def _transfer_error(self, phase: str, others: str, got: str) -> TransferError:
        expected = f"{others} to answer within {self._timeout_seconds:g} s"
        remedy = "Find the first rank that reported another error or died, correct that, then start again."
        return TransferError(f"rank {self.rank}, {phase}", expected=expected, got=got, remedy=remedy)

    def _named(self, peers: Sequence[int] | None) -> str:
        return self._everyone if peers is None else "ranks " + ", ".join(map(str, peers))

    def _give_up(self, posted: Posted) -> None:
        """End this process: its main thread waits for a GPU that waits for a peer, and cannot be interrupted."""
        self.phase = f"{posted.phase}, waiting for {posted.others}"
        print(self._transfer_error(posted.phase, posted.others, "no answer"), file=sys.stderr, flush=True)
        os._exit(TransferError.exit_status)


class _Among(TorchTransport):
    """Some ranks of a world, for collectives, or all of them with a group for transfers."""

    def __init__(self, world: TorchTransport, ranks: Sequence[int], groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._world = world
        self.rank, self.world_size, self.device_ranks = ranks.index(world.rank), len(ranks), world.device_ranks
        self.clock, self._watch, self._timeout_seconds = world.clock, world._watch, world._timeout_seconds
        self._groups, self._everyone = dict(groups), self._named(ranks)
        self._device, self._connected = world._device, set[int]()

    @property
    def phase(self) -> str:
        return self._world.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._world.phase = phase

    def close(self) -> None:
        """Leave it open: the world closes it."""


@dataclass(kw_only=True)
class _TorchPending:
    """A call of torch.distributed; `wait` blocks the host until it has ended, or, `on_stream`, the current stream."""

    transport: TorchTransport
    works: Sequence[dist.Work]
    peers: Sequence[int] | None
    phase: str  # when posted; the host may be much further when it waits
    alive: Sequence[Tensor]  # kept because gloo and NCCL use them in the background
    on_stream: bool

    def wait(self) -> None:
        if not self.works:
            return
        with self.transport.clock.waiting(on_stream=self.on_stream, in_collective=self.peers is None):
            for work in self.works:
                self.transport._guard(work.wait, self.peers, phase=self.phase)
        self.works = self.alive = ()


def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


def _without_place(message: str) -> str:
    """Remove the source position from gloo's first line."""
    return re.sub(r"^\[[^\]]*\.(cc|h|cpp):\d+\] ", "", message.split("\n")[0])


# torch 2.13 renames these calls and deprecates the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
