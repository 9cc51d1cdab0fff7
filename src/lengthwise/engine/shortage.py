"""Device memory: how much is free and in use, and the error where it runs out."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lengthwise.comm import Transport
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.host_memory import free_host_bytes
from lengthwise.report.figures import count

SMALLER_MICROBATCHES = (
    "Set recompute: layer, or lower capacity_tokens: longer sequences are then cut over more ranks, packs are smaller."
)
SMALLER_STATE = "Use bf16, a smaller model, or more ranks: optimizer state and master weights are split over them."


@contextlib.contextmanager
def reporting_shortage(where: Callable[[], str], *, needs: Callable[[], str], remedy: str) -> Iterator[None]:
    """Raise MemoryShortage where the block runs out of device memory; only then are `where` and `needs` called."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = (str(error).strip().splitlines() or ["out of memory"])[0].rstrip(".")
        got = f"{first}{memory_in_use()}"
        raise MemoryShortage(where(), expected=f"{needs()} to fit", got=got, remedy=remedy) from error


def reporting_update(transport: Transport) -> contextlib.AbstractContextManager[None]:
    """Raise MemoryShortage where the end of a step, which the block runs, runs out of device memory."""
    return reporting_shortage(
        lambda: f"rank {transport.rank}, {transport.phase}",
        needs=lambda: "the sum of gradients and the update",
        remedy=SMALLER_STATE,
    )


class PeakMemory:
    """Peak bytes of this process since `start`: on its GPU, else resident in memory."""

    def start(self) -> None:
        """Reset the peak; only Linux can for resident memory, elsewhere it is the peak since the process began."""
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident size

    def peak_bytes(self) -> int:
        """Return the bytes."""
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else 1024 * most


def free_bytes(device: torch.device, ranks: int) -> float:
    """Return the free bytes for one of `ranks` ranks that share the memory of a device, or of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free / ranks + cached
    return free_host_bytes() / ranks


def memory_in_use() -> str:
    """Return "; this process held ..." with the peak and total bytes of its GPU; "" without a GPU."""
    if not torch.cuda.is_initialized():
        return ""
    device = torch.cuda.current_device()
    most, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f"; this process held {count(most)}B at most, of {count(total)}B on {torch.cuda.get_device_name(device)}"
