"""Stacks of all ranks after a timeout: one file per rank, `rank-00003.txt`, with the stacks of its threads.

A rank whose own transfer timed out writes its stacks itself. A rank that never answered gets a signal, whose handler
needs no Python, so that a rank that hangs in a library writes too. A stopped rank is continued for it, then ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TypeVar

from lengthwise.core.errors import TransferError

Result = TypeVar("Result")
FOLDER = "hang"  # within the output of a run
_SECONDS, _POLL_SECONDS = 1.0, 0.1  # time that ranks have to write
_STDERR = 2


def write_stacks(file: FileIO, error: TransferError) -> None:
    """Write the traceback of an error, and the stacks of this process's threads.

    Raises:
        OSError: the file cannot be written.
    """
    file.write(f"{''.join(traceback.format_exception(error))}\nall threads, after that:\n".encode())
    faulthandler.dump_traceback(file, all_threads=True)


def with_own_stacks(work: Callable[[], Result], folder: Path, rank: int) -> Result:
    """Call `work` on a rank of another launcher; write its stacks into `folder` if a transfer times out.

    During the call SIGUSR1 writes the stacks of its threads to stderr.
    """
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    try:
        return work()
    except TransferError as error:
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            with _opened(folder, rank, error.where) as file:
                write_stacks(file, error)
            error.remedy += _sentence(folder)
        raise
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def keep_stacks(files: Sequence[FileIO], seen: Sequence[str], alive: Mapping[int, int], folder: Path) -> str:
    """Copy the ranks' stacks into `folder`, with the phases `seen`; return a sentence for an error, or "".

    alive: the pids of ranks that may still write, by rank. They get SIGUSR1, for which they have registered their file
    with `faulthandler.register`.
    """
    for pid in alive.values():
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
    end, kept, before = time.monotonic() + _SECONDS, "", list[int]()
    while time.monotonic() < end:  # until all have written, and their files stop growing
        sizes = [_size(files[rank]) for rank in alive]
        if all(sizes) and sizes == before:
            break
        before = sizes
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(OSError):
        for rank, source in enumerate(files):
            if _size(source):
                with _opened(folder, rank, seen[rank]) as file:
                    file.write(os.pread(source.fileno(), _size(source), 0))
                kept = _sentence(folder)
    return kept


@contextlib.contextmanager
def _opened(folder: Path, rank: int, seen: str) -> Iterator[FileIO]:
    folder.mkdir(parents=True, exist_ok=True)
    with FileIO(folder / f"rank-{rank:05d}.txt", "w") as file:
        file.write(f"rank {rank}, {seen}\n\n".encode())
        yield file


def _size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _sentence(folder: Path) -> str:
    return f" The stacks of the ranks are in {folder}."
