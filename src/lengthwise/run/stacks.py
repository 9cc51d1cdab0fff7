"""Where ranks stood when one of them waited in vain: a file a rank, `rank-00003.txt`, with the stacks of its threads.

A rank whose own transfer timed out writes where it was. One that never answered is asked by a signal, which needs no
Python: a rank that hangs in a library writes, too, and one that was stopped is continued for it, before it is ended.
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
_SECONDS, _POLL_SECONDS = 1.0, 0.1  # that ranks which are asked have
_STDERR = 2


def write_stacks(file: FileIO, error: TransferError) -> None:
    """Write where this process raised an error, and where its threads are now; OSError: it cannot be written."""
    file.write(f"{''.join(traceback.format_exception(error))}\nall threads, after that:\n".encode())
    faulthandler.dump_traceback(file, all_threads=True)


def with_own_stacks(work: Callable[[], Result], folder: Path, rank: int) -> Result:
    """Call `work` on a rank that nobody here watches; keep its stacks in `folder` where a transfer timed out.

    SIGUSR1 then writes the stacks of its threads to stderr, of a rank that hangs elsewhere, too.
    """
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    try:
        return work()
    except TransferError as error:
        with contextlib.suppress(OSError):  # no room for stacks hides no error
            with _opened(folder, rank, error.where) as file:
                write_stacks(file, error)
            error.remedy += _sentence(folder)
        raise
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def keep_stacks(files: Sequence[FileIO], seen: Sequence[str], alive: Mapping[int, int], folder: Path) -> str:
    """Copy what each rank wrote into `folder`, under where it was `seen`; return a sentence for an error, or "".

    alive: the pid of each rank that may still write; it is asked to, and has given its file to `faulthandler.register`
    for SIGUSR1.
    """
    for pid in alive.values():
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
    end, kept, before = time.monotonic() + _SECONDS, "", list[int]()
    while time.monotonic() < end:  # until all have written something, and write no more
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
    return f" Where each rank stood: {folder}."
