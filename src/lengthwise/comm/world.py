"""Which rank this process is, its device, how it finds the others. The only reader of the launcher's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lengthwise.comm.devices import gpu_of
from lengthwise.core.errors import ConfigError, RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What a rank knows of the others once all have come: whether any two share a GPU, how many share its device."""

    shares_gpus: bool
    device_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process of a run. `rendezvous` is a file that all local ranks share; None: torchrun's environment.

    `gpus` is how many GPUs of this machine this process sees, and the run uses; 0: it computes on the CPU.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_size: int = 1  # ranks on this machine
    rendezvous: Path | None = None
    gpus: int = 0

    @property
    def device(self) -> torch.device:
        """The device of this rank; local ranks beyond the number of GPUs count from the first one again.

        They share it, unless the launcher shows each process other GPUs: ranks that have met know (see `connect`).
        """
        return torch.device("cuda", self.local_rank % self.gpus) if self.gpus else torch.device("cpu")

    def claim_device(self) -> None:
        """Make the rank's GPU the current one; before anything else touches CUDA, which would else take GPU 0."""
        if self.gpus:
            torch.cuda.set_device(self.device)

    def connect(self, timeout: timedelta) -> Met:
        """Join the process group of all ranks, over gloo; return who shares a GPU.

        GPUs get groups of their own beside it (see `TorchTransport`); this one is for what lies in host memory.

        Raises:
            RankError: some ranks have a GPU and others have none.
        """
        self.claim_device()
        if self.rendezvous is None:
            store, *_ = next(iter(rendezvous("env://", self.rank, self.world_size, timeout=timeout)))
            # torchrun keeps one store for all its starts: what ranks wrote that are dead would be met there.
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"start {start} of {self.world_size}", store)
        else:
            _use_loopback()
            store = FileStore(str(self.rendezvous), self.world_size)
        store.set_timeout(timeout)
        on_gpu, met = self._meet(PrefixStore("lengthwise", store), timeout)
        if on_gpu not in (0, self.world_size):
            where = f"rank {self.rank}, start"
            got = f"{on_gpu} of {self.world_size} on a GPU; this one {'is' if self.gpus else 'is not'}"
            remedy = "Set device: cpu in the run file, or start on machines that all have GPUs."
            raise RankError(where, expected="all ranks on GPUs, or all on the CPU", got=got, remedy=remedy)
        store = PrefixStore("default_pg", store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        return met

    def _meet(self, store: Store, timeout: timedelta) -> tuple[int, Met]:
        """Return how many ranks are on a GPU, and who shares one; the former the same on all ranks, as `shares_gpus`.

        Which transport a run takes follows from it, and must be known before the first group is made. Each rank adds
        itself to the count of its GPU, and says so where it is not the first there.
        """
        store.add("on_gpu", int(self.gpus > 0))
        mine = f"on {gpu_of(self.device)}" if self.gpus else None
        if mine is not None and store.add(mine, 1) > 1:
            store.add("sharing", 1)
        if store.add("here", 1) == self.world_size:
            store.set("everyone", "is here")
        store.wait(["everyone"], timeout)
        device_ranks = self.local_size if mine is None else store.add(mine, 0)
        return store.add("on_gpu", 0), Met(shares_gpus=store.add("sharing", 0) > 0, device_ranks=device_ranks)


def world_from_environment() -> World | None:
    """Return torchrun's world, or None when the process was started alone.

    Raises:
        ConfigError: some but not all of torchrun's variables are set, they are not numbers, or the rank is not in the
            world.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name) for name in names}
    if values["RANK"] is None and values["WORLD_SIZE"] is None:
        return None
    numbers = [values[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    complete = all(values.values()) and all(number and number.isdigit() for number in numbers)
    if not complete or int(numbers[0] or 0) >= int(numbers[1] or 0):
        where, got = "environment", ", ".join(f"{name}={value}" for name, value in values.items())
        remedy = "Start with torchrun, or unset these variables and use --ranks."
        raise ConfigError(where, expected=f"all of {', '.join(names)}, as torchrun sets them", got=got, remedy=remedy)
    rank, world_size, local_rank = (int(number or 0) for number in numbers)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # launchers other than torchrun may leave it out
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=int(local_size) if local_size.isdigit() and int(local_size) else world_size,
    )


def _use_loopback() -> None:
    """Keep local runs off the network: gloo would else look up the host's name, which many machines cannot resolve."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
