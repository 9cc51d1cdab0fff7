"""A process's rank, its device, and the way to the others, from the launcher's environment."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lengthwise.comm.devices import gpu_of
from lengthwise.comm.groups import gloo_group
from lengthwise.core.errors import ConfigError, RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What a rank learns when all have come.

    shares_gpus: True if any two ranks share a GPU. device_ranks: number of ranks on this rank's device. host: group for
    host memory. owned: True if we made the process group, so we end it.
    """

    shares_gpus: bool
    device_ranks: int
    host: dist.ProcessGroup
    owned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process of a run.

    rendezvous: file that all local ranks share; None means torchrun's environment. gpus: number of GPUs of this machine
    that this process sees and the run uses, 0 for the CPU. attached: True if the process group exists already. ended:
    reason why the ranks before these ended, "" at the first start.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_size: int = 1  # number of ranks on this machine
    rendezvous: Path | None = None
    gpus: int = 0
    attached: bool = False
    ended: str = ""

    @property
    def device(self) -> torch.device:
        """Device of this rank; if there are more local ranks than GPUs, they share GPUs in turn."""
        return torch.device("cuda", self.local_rank % self.gpus) if self.gpus else torch.device("cpu")

    def claim_device(self) -> None:
        """Make the rank's GPU the current one, before CUDA starts, which would otherwise use GPU 0."""
        if self.gpus:
            torch.cuda.set_device(self.device)

    def connect(self, timeout: timedelta) -> Met:
        """Join the gloo group of all ranks, or the existing one, and return what the ranks share."""
        self.claim_device()  # also in a user's loop: clocks and memory are those of the current device
        if self.attached:
            host = gloo_group(timeout)
            on_gpu, shares_gpus, device_ranks = self._ask(host)
            self._refuse_some(on_gpu)
            return Met(shares_gpus=shares_gpus, device_ranks=device_ranks, host=host, owned=False)
        if self.rendezvous is None:
            store, *_ = next(iter(rendezvous("env://", self.rank, self.world_size, timeout=timeout)))
            # torchrun may keep one store for all its starts, which then has entries of dead ranks. Each node counts
            # its own starts, so several nodes need a new store each time (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
            shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "in a new store"
            # A process may meet the others again, as two sessions in a row do.
            store = PrefixStore(f"start {start} of {self.world_size}, meeting {next(_meetings)}", store)
        else:
            _use_loopback()
            store = FileStore(str(self.rendezvous), self.world_size)
        store.set_timeout(timeout)
        on_gpu, shares_gpus, device_ranks = self._meet(PrefixStore("lengthwise", store), timeout)
        self._refuse_some(on_gpu)
        store = PrefixStore("default_pg", store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        host = dist.group.WORLD
        assert host is not None, "init_process_group made it"
        return Met(shares_gpus=shares_gpus, device_ranks=device_ranks, host=host, owned=True)

    def _refuse_some(self, on_gpu: int) -> None:
        if on_gpu not in (0, self.world_size):
            where = f"rank {self.rank}, start"
            got = f"{on_gpu} of {self.world_size} on a GPU; this one {'is' if self.gpus else 'is not'}"
            remedy = "Set device: cpu in the run file, or start on machines that all have GPUs."
            raise RankError(where, expected="all ranks on GPUs, or all on the CPU", got=got, remedy=remedy)

    def _meet(self, store: Store, timeout: timedelta) -> tuple[int, bool, int]:
        """Return (ranks on GPUs, whether any share one, ranks on this one's device); the first two agree on all ranks.

        The transport depends on them, before the first group is made: each rank adds itself to the count of its GPU.
        """
        store.add("on_gpu", int(self.gpus > 0))
        own = f"on {gpu_of(self.device)}" if self.gpus else None
        if own is not None and store.add(own, 1) > 1:
            store.add("sharing", 1)
        if store.add("here", 1) == self.world_size:
            store.set("everyone", "is here")
        store.wait(["everyone"], timeout)
        device_ranks = self.local_size if own is None else store.add(own, 0)
        return store.add("on_gpu", 0), store.add("sharing", 0) > 0, device_ranks

    def _ask(self, host: dist.ProcessGroup) -> tuple[int, bool, int]:
        """Return the same as `_meet` over an existing group: ranks compare digests of their GPUs' names."""
        name = gpu_of(self.device) if self.gpus else f"cpu of {socket.gethostname()}"
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
        own = torch.tensor([int(self.gpus > 0), digest])
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=host)
        on_gpu, devices = sum(int(row[0]) for row in rows), [int(row[1]) for row in rows]
        return on_gpu, on_gpu > 0 and len(set(devices)) < len(devices), devices.count(digest)


_meetings = count()  # the same number on all ranks, which meet equally often

_MPI = {  # launchers' variables for rank, size, and rank and size on this machine
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def world_from_environment() -> World | None:
    """Return the world of torchrun or mpirun, or None if the process was started alone.

    Raises ConfigError if torchrun's variables are incomplete, invalid or contradictory, or if mpirun started several
    machines without the address of the first.
    """
    values = {name: os.environ.get(name) for name in _TORCHRUN}
    if values["RANK"] is None and values["WORLD_SIZE"] is None:
        _take_from_mpi()
        values = {name: os.environ.get(name) for name in _TORCHRUN}
    if values["RANK"] is None and values["WORLD_SIZE"] is None:
        return None
    numbers = [values[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    complete = all(values.values()) and all(number and number.isdigit() for number in numbers)
    if not complete or int(numbers[0] or 0) >= int(numbers[1] or 0):
        where, got = "environment", ", ".join(f"{name}={value}" for name, value in values.items())
        remedy = "Start with torchrun, or unset these variables and use --ranks."
        raise ConfigError(where, expected=f"all of {', '.join(values)}, as torchrun sets them", got=got, remedy=remedy)
    rank, world_size, local_rank = (int(number or 0) for number in numbers)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # launchers other than torchrun may lack it
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=int(local_size) if local_size.isdigit() and int(local_size) else world_size,
    )


def _take_from_mpi() -> None:
    """Set torchrun's variables from mpirun's; torch and accelerate read them."""
    for launcher, names in _MPI.items():
        found = [os.environ.get(name, "") for name in names]
        if not all(each.isdigit() for each in found) or int(found[1]) < 2:
            continue
        rank, size, local_rank, local_size = found
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if local_size == size else {}
        meeting |= {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name)}
        if len(meeting) < 2:
            got = f"{size} processes of {launcher} on several machines, and no MASTER_ADDR or MASTER_PORT"
            remedy = "Give mpirun the name of the first machine and a free port of it: -x MASTER_ADDR=... in Open MPI."
            raise ConfigError("environment", expected="the address where ranks meet", got=got, remedy=remedy)
        own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
        os.environ.update(own | meeting)
        return


def session_world(device: torch.device) -> World:
    """Return the world of a user's loop whose model is on `device`; ConfigError for incomplete launcher variables."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    local = 0
    if device.type == "cuda":
        local = torch.cuda.current_device() if device.index is None else device.index
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
        return World(
            rank=dist.get_rank(), world_size=size, local_rank=local, local_size=local_size, gpus=gpus, attached=True
        )
    launched = world_from_environment()
    if launched is None or launched.world_size == 1:
        return World(rank=0, world_size=1, local_rank=local, gpus=gpus)
    return replace(launched, local_rank=local if gpus else launched.local_rank, gpus=gpus)


def _use_loopback() -> None:
    """Keep local runs off the network: gloo would look up the host's name, which may not resolve."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
