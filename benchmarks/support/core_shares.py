"""A fixed share of a core for each process: any number of ranks, each computing as if it had a slower core alone.

A cgroup a rank (version 1 or 2) with a quota of CPU time and more weight than all other processes, and the rank pinned
to one core. What one leaves unused no other gets, so wall-clock seconds of all together are those of a machine with as
many, slower, cores; and what is left of the real ones takes in what other processes and virtual machines steal: stolen
time does not count to a quota. Needs root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lengthwise.core.errors import ConfigError

PERIOD_SECONDS = 0.005  # short beside what ranks wait for each other, long beside a switch of processes
_ROOT, _PREFIX = Path("/sys/fs/cgroup"), "lengthwise-cores-"


class CoreShares:
    """The groups of all ranks; a forked process enters its own before it computes."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def enter(self, rank: int) -> None:
        """Move this process, and what it starts, into the group of a rank, on one core."""
        (self._folders[rank] / "cgroup.procs").write_text(str(os.getpid()))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def core_shares(ranks: int, share: float) -> Iterator[CoreShares]:
    """Make a group a rank that computes for `share` of the time, 0 to 1; removed when the block is left.

    Raises:
        ConfigError: no right to make groups, or none of these kinds.
    """
    folders: list[Path] = []
    try:
        for rank in range(ranks):
            folders.append(_make(f"{_PREFIX}{os.getpid()}-{rank}", share))
        yield CoreShares(folders)
    finally:
        for folder in folders:
            folder.rmdir()


def _make(name: str, share: float) -> Path:
    period = round(1e6 * PERIOD_SECONDS)
    quota = round(share * period)
    first = _ROOT / "cpu" / name
    try:
        if first.parent.is_dir():
            first.mkdir()
            (first / "cpu.cfs_period_us").write_text(str(period))
            (first / "cpu.cfs_quota_us").write_text(str(quota))
            (first / "cpu.shares").write_text("262144")
            return first
        second = _ROOT / name
        second.mkdir()
        (second / "cpu.max").write_text(f"{quota} {period}")
        (second / "cpu.weight").write_text("10000")
    except OSError as error:
        remedy = "Run as root on Linux with the cpu controller of cgroups, or with --core-use 0."
        raise ConfigError(
            "--core-use", expected="a cgroup with a quota of CPU time", got=str(error), remedy=remedy
        ) from None
    return second
