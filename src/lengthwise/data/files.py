"""Files of rows and images: whether they can be read, and what differs if they were changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lengthwise.core.errors import DataError

_EDGE_BYTES = 1 << 16  # of the begin and end of a file that its digest covers


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Translate errors of the system in reading a regular file inside the block to DataError."""
    try:
        if not path.is_file():  # a pipe would block, a device would never end
            got = "a folder" if path.is_dir() else "something else" if path.exists() else "nothing there"
            raise DataError(printable_name(path), expected="a regular file", got=got, remedy="Correct the path.")
        yield
    except OSError as error:
        raise unreadable(path, error) from None


def content_of(path: Path, *, is_document: bool = False) -> list[Any]:
    """Return the size of a file and the digest of its first and last bytes; of a document the size alone."""
    with readable(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if is_document:
            return [size]
        found = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(max(0, size - _EDGE_BYTES))
        found.update(file.read(_EDGE_BYTES))
    return [size, found.hexdigest()]


def version_of(path: Path) -> tuple[int, int, int]:
    """Return inode, size and time of a file; zeros if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file or folder that the system does not let us read."""
    got, remedy = error.strerror or str(error), "Correct the path or its permissions."
    return DataError(printable_name(path), expected="a file or folder that can be read", got=got, remedy=remedy)


def printable_name(name: str | Path) -> str:
    """Return a file name as UTF-8, for messages."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")
