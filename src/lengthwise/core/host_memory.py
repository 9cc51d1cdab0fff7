"""Free memory of this machine or container."""

from __future__ import annotations

from pathlib import Path


def free_host_bytes() -> float:
    """Return the free bytes, page cache included; 0 if the system does not report them."""
    free = [_available_bytes(), _cgroup_bytes()]
    return min((each for each in free if each is not None), default=0.0)


def _available_bytes() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return None


def _cgroup_bytes() -> float | None:
    """Return the bytes that this container may still allocate; its page cache counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        most, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return None if most == "max" else float(int(most) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no cgroup, or version 1
        return None
