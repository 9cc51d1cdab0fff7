"""A fixed share of a core for each process: any number of ranks, each computing as if it had a slower core alone.

A cgroup a rank (version 1 or 2) with a quota of CPU time and more weight than all other processes, and the rank pinned
to one core. What one leaves unused no other gets, so wall-clock seconds of all together are those of a machine with as
many, slower, cores; and what is left of the real ones takes in what other processes and virtual machines steal: stolen
time does not count to a quota. Needs root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lengthwise.core.errors import ConfigError

LEAST_SECONDS = 0.001
PERIOD_SECONDS = 0.005  # short beside what ranks wait for each other, long beside a switch of processes
_ROOT, _PREFIX = Path("/sys/fs/cgroup"), "lengthwise-cores-"


class CoreShares:
    """The groups of all ranks; a forked process enters its own before it computes."""

    def __init__(self, folders: Sequence[Path], shares: Sequence[float]) -> None:
        self._folders, self._shares = folders, shares

    def enter(self, rank: int) -> None:
        """Move this process, and what it starts, into the group of a rank; on one core, where it gets no more."""
        (self._folders[rank] / "cgroup.procs").write_text(str(os.getpid()))
        if self._shares[rank] <= 1:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def core_shares(shares: Sequence[float]) -> Iterator[CoreShares]:
    """Make a group a rank: entry r is how much of one core it gets, or of several; removed when the block is left.

    Raises:
        ConfigError: no right to make groups, or none of these kinds.
    """
    folders = [_folder(f"{_PREFIX}{os.getpid()}-{rank}") for rank in range(len(shares))]
    try:
        try:
            for folder, share in zip(folders, shares, strict=True):
                _make(folder, share)
        except OSError as error:
            remedy = "Run as root on Linux with the cpu controller of cgroups, or with --core-use 0."
            raise ConfigError("--core-use", expected="a cgroup a rank", got=str(error), remedy=remedy) from None
        yield CoreShares(folders, shares)
    finally:
        for folder in folders:
            if folder.is_dir():
                folder.rmdir()


def quota(share: float) -> tuple[int, int]:
    """Return (microseconds of computing, of these microseconds) of a rank; the kernel takes no quota below 1 ms."""
    period = max(PERIOD_SECONDS, LEAST_SECONDS / share)
    return round(1e6 * share * period), round(1e6 * period)


def _folder(name: str) -> Path:
    first = _ROOT / "cpu"
    return (first if first.is_dir() else _ROOT) / name


def _make(folder: Path, share: float) -> None:
    computing, period = quota(share)
    folder.mkdir()
    if folder.parent == _ROOT:
        (folder / "cpu.max").write_text(f"{computing} {period}")
        (folder / "cpu.weight").write_text("10000")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(computing))
        (folder / "cpu.shares").write_text("262144")
