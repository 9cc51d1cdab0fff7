"""Files: what makes one last, and reading one that is plain and of sensible size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 256 << 20  # of a file that is read whole; a plan of a million sequences has 30 MB
_OPENED = ("/dev/fd", "/proc/self/fd")  # where a shell puts what it opened itself: `--lengths <(command)`


def sync(path: Path) -> None:
    """Bring a file or folder to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_readable(path: Path) -> None:
    """Give a file the mode of any new one: some libraries write theirs for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def read_plain(path: str | Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file, or a pipe that the shell opened.

    Raises:
        OSError: there is none; a device or another pipe, which may have no end and nobody to write it; too many bytes.
    """
    with open(_opened(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes:,} bytes")
    return content


def _opened(path: str | Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes would be waited for
    except ValueError:  # NUL, or what no encoding has
        raise OSError(errno.EINVAL, "no name that a file can have") from None
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or (stat.S_ISFIFO(kind) and _is_the_shells(path)):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "a device or a pipe")


def _is_the_shells(path: str | Path) -> bool:
    return str(path) == "/dev/stdin" or os.path.dirname(path) in _OPENED
