"""The machine and software of measurements: processor, device, threads, versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lengthwise.core import __version__
from lengthwise.core.measurements import Clock, MeasuredPlace


def processor_name() -> str:
    """Return the processor's name, as precisely as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def first_gpu_name() -> str | None:
    """Return the name of the first GPU, asked in a child process, or None if the driver fails."""
    import torch

    from lengthwise.comm.devices import ask_in_a_child

    found = ask_in_a_child(lambda: str(torch.cuda.get_device_name(0)))
    return found if isinstance(found, str) else None  # use of the GPU reports the full error


def device_bytes() -> float | None:
    """Return the memory of a GPU in bytes, asked in a child process, or None if the driver fails."""
    import torch

    from lengthwise.comm.devices import ask_in_a_child

    found = ask_in_a_child(lambda: float(torch.cuda.get_device_properties(0).total_memory))
    return found if isinstance(found, float) else None


def this_place(*, gpu: int | None, ranks: int, ranks_per_node: int, clock: Clock) -> MeasuredPlace:
    """Describe this process's machine. gpu: index of its CUDA device, None on the CPU."""
    import torch
    import transformers

    return MeasuredPlace(
        device="cpu" if gpu is None else torch.cuda.get_device_name(gpu),
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        clock=clock,
        versions={
            "lengthwise": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
        },
    )
