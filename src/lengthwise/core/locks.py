"""A file that one process at a time holds: the system frees it at the process's end, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO


def try_lock(path: Path) -> TextIO | str:
    """Hold `path`, which is made, until the file that is returned is closed; or return who holds it, in words.

    Whoever holds it may remove it before closing it. OSError: it cannot be made.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                return file.read().strip() or "another process"
        with contextlib.suppress(FileNotFoundError):  # its owner removed it between our two calls
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()
    file.truncate(0)
    file.write(f"{owner_name(os.getpid())}\n")
    file.flush()
    return file


def owner_name(pid: int) -> str:
    """Return what `try_lock` calls a process of this machine."""
    return f"process {pid} on {socket.gethostname()}"
