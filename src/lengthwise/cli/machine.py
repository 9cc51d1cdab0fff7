"""A description of this machine, for its measurements."""

from __future__ import annotations

import os
import platform

from lengthwise.core import __version__
from lengthwise.report.figures import count


def machine_lines() -> list[str]:
    """Return lines on the machine and the versions of the libraries."""
    import torch
    import transformers

    from lengthwise.comm import count_gpus
    from lengthwise.profiler.place import processor_name

    total = memory_bytes()
    memory = "memory unknown" if total is None else f"{count(total)}B memory"
    return [
        "[bold]Machine[/bold]",
        f"{processor_name()}, {os.cpu_count()} cores, {memory}, {count_gpus()} GPUs; "
        f"{platform.system()} {platform.release()}",
        f"lengthwise {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    ]


def memory_bytes() -> float | None:
    """Return the memory of this machine in bytes, or None if unknown."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not POSIX
        return None
