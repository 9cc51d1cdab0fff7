"""Which rank this process is, and how it finds the others. The only reader of the launcher's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from lengthwise.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process of a run. `rendezvous` is a file that all local ranks share; None: torchrun's environment."""

    rank: int
    world_size: int
    local_rank: int = 0
    rendezvous: Path | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank: CPU for now; CUDA comes with its own kernels and tests."""
        return torch.device("cpu")

    def connect(self, timeout: timedelta) -> None:
        """Join the process group of all ranks."""
        if self.rendezvous is None:
            dist.init_process_group("gloo", timeout=timeout)
            return
        _use_loopback()
        store = FileStore(str(self.rendezvous), self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)


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
        raise ConfigError(
            "environment",
            expected=f"all of {', '.join(names)}, as torchrun sets them",
            got=", ".join(f"{name}={value}" for name, value in values.items()),
            remedy="Start with torchrun, or unset these variables and use --ranks.",
        )
    rank, world_size, local_rank = (int(number or 0) for number in numbers)
    return World(rank=rank, world_size=world_size, local_rank=local_rank)


def _use_loopback() -> None:
    """Keep local runs off the network: gloo would else look up the host's name, which many machines cannot resolve."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
