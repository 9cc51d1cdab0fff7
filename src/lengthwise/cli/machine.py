"""What this machine is: the frame of every number measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lengthwise import __version__
from lengthwise.report.figures import count


def machine_lines() -> list[str]:
    """Describe the machine and the versions that compute on it."""
    import torch
    import transformers

    from lengthwise.comm import count_gpus

    return [
        "[bold]Machine[/bold]",
        f"{_cpu_name()}, {os.cpu_count()} cores, {_memory()}, {count_gpus()} GPUs; "
        f"{platform.system()} {platform.release()}",
        f"lengthwise {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    ]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> float | None:
    """Return the memory of this machine in bytes; None where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not POSIX
        return None


def _memory() -> str:
    total = memory_bytes()
    return "memory unknown" if total is None else f"{count(total)}B memory"
