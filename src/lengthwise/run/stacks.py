"""Where ranks stood when one of them waited in vain: a file a rank, `rank-00003.txt`, with the stacks of its threads.

A rank whose own transfer timed out writes where it was. One that never answered is asked by a signal, which needs no
Python: a rank that hangs in a library writes, too, and one that was stopped is continued for it, before it is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from lengthwise.core.errors import TransferError

Result = TypeVar("Result")
FOLDER = "hang"  # within the output of a run
_SECONDS = 1.0  # that a rank which is asked has


def file_of(folder: Path, rank: int) -> Path:
    """Name a rank's file."""
    return folder / f"rank-{rank:05d}.txt"


@contextlib.contextmanager
def writing_stacks(path: Path) -> Iterator[None]:
    """Write the stacks of this process into `path` when it is asked to, and where the block raises a TransferError.

    Where they cannot be written, on a full disk say, the block runs, and ends, as without them.
    """
    file = _opened(path)
    if file is not None:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    try:
        yield
    except TransferError as error:
        if file is not None:
            with contextlib.suppress(OSError):
                _write_own(file, error)
        raise
    finally:
        if file is not None:
            faulthandler.unregister(signal.SIGUSR1)
            with contextlib.suppress(OSError):
                file.close()


def _opened(path: Path) -> TextIO | None:
    try:
        return path.open("w", encoding="utf-8")
    except OSError:
        return None


def _write_own(file: TextIO, error: TransferError) -> None:
    file.write("".join(traceback.format_exception(error)))
    file.write("\nall threads, after that:\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)


def with_own_stacks(work: Callable[[], Result], folder: Path, rank: int) -> Result:
    """Call `work` on a rank that nobody here watches; keep its stacks in `folder` where a transfer timed out."""
    try:
        place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError:  # no room for stacks is no reason not to train
        return work()
    with place:
        own = {rank: file_of(Path(place.name), rank)}
        try:
            with writing_stacks(own[rank]):
                return work()
        except TransferError as error:
            if not keep_stacks(own, folder, {rank: error.where}):
                raise
            remedy = f"{error.remedy} {stacks_sentence(folder)}"
            raise TransferError(error.where, expected=error.expected, got=error.got, remedy=remedy) from None


def stacks_sentence(folder: Path) -> str:
    """Say in an error where stacks are."""
    return f"Where each rank stood: {folder}."


def ask_for_stacks(files: Mapping[int, Path]) -> None:
    """Ask processes, by their pid, for their stacks; return when all have written, or after a second."""
    for pid in files:
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and not all(path.exists() and path.stat().st_size for path in files.values()):
        time.sleep(0.02)


def keep_stacks(files: Mapping[int, Path], folder: Path, said: Mapping[int, str]) -> bool:
    """Copy what ranks wrote into `folder`, under what is `said` of each; return whether anything is there now."""
    written = {rank: path for rank, path in files.items() if path.exists() and path.stat().st_size}
    with contextlib.suppress(OSError):
        for rank, path in written.items():
            folder.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8", errors="replace")
            file_of(folder, rank).write_text(f"rank {rank}, {said[rank]}\n\n{text}", encoding="utf-8")
        return bool(written)
    return False
