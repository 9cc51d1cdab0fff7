"""Which rank this process is, its device, how it finds the others. The only reader of the launcher's environment."""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lengthwise.core.errors import ConfigError, RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process of a run. `rendezvous` is a file that all local ranks share; None: torchrun's environment.

    `gpus` is how many GPUs of this machine the run uses; 0: it computes on the CPU.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_size: int = 1  # ranks on this machine
    rendezvous: Path | None = None
    gpus: int = 0

    @property
    def device(self) -> torch.device:
        """The device of this rank; local ranks beyond the number of GPUs share those there are."""
        return torch.device("cuda", self.local_rank % self.gpus) if self.gpus else torch.device("cpu")

    def claim_device(self) -> None:
        """Make the rank's GPU the current one; before anything else touches CUDA, which would else take GPU 0."""
        if self.gpus:
            torch.cuda.set_device(self.device)

    def connect(self, timeout: timedelta) -> bool:
        """Join the process group of all ranks, over gloo; return whether any two of them share a GPU.

        GPUs get groups of their own beside it (see `TorchTransport`); this one is for what lies in host memory.

        Raises:
            RankError: some ranks have a GPU and others have none.
        """
        self.claim_device()
        if self.rendezvous is None:
            store, *_ = next(iter(rendezvous("env://", self.rank, self.world_size, timeout=timeout)))
        else:
            _use_loopback()
            store = FileStore(str(self.rendezvous), self.world_size)
        store.set_timeout(timeout)
        on_gpu, sharing = self._count(PrefixStore("lengthwise", store), timeout)
        if on_gpu not in (0, self.world_size):
            where = f"rank {self.rank}, start"
            got = f"{on_gpu} of {self.world_size} on a GPU; this one {'is' if self.gpus else 'is not'}"
            remedy = "Set device: cpu in the run file, or start on machines that all have GPUs."
            raise RankError(where, expected="all ranks on GPUs, or all on the CPU", got=got, remedy=remedy)
        store = PrefixStore("default_pg", store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        return sharing > 0

    def _count(self, store: Store, timeout: timedelta) -> tuple[int, int]:
        """Return how many ranks are on a GPU, and how many share theirs with one before them; the same on all ranks.

        Which transport a run takes follows from it, and must be known before the first group is made.
        """
        store.add("on_gpu", int(self.gpus > 0))
        store.add("sharing", int(0 < self.gpus <= self.local_rank))
        if store.add("here", 1) == self.world_size:
            store.set("everyone", "is here")
        store.wait(["everyone"], timeout)
        return store.add("on_gpu", 0), store.add("sharing", 0)


def count_gpus() -> int:
    """Count the CUDA devices, in a child process: where NVML is missing, counting starts the driver in the process.

    A process that started it cannot fork ranks that use a GPU.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return 0
    context = multiprocessing.get_context("fork")
    our_pipe, their_pipe = context.Pipe(duplex=False)
    child = context.Process(target=lambda: their_pipe.send(torch.cuda.device_count()))
    child.start()
    their_pipe.close()
    try:
        return int(our_pipe.recv())
    except EOFError:  # the driver itself failed: as good as no GPU, and torch says more when one is asked for
        return 0
    finally:
        child.join()
        our_pipe.close()


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
