"""What happens beside `datasets.map` while it prepares data: files that are whole are noted, stopped processes ended.

`map` renames a file when it is written, but does not wait for the disk. A file counts as whole once it is brought to
the disk and its size is noted, so that a machine that loses power keeps no file that is cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from lengthwise.core.files import sync
from lengthwise.core.errors import RankError
from lengthwise.core.processes import end_with_parent

_NOTED = "work/whole.jsonl"
_LOOK_SECONDS = 0.25
_held: list[TextIO] = []  # locks that children of this process are not to hold


def _begin_child() -> None:
    """Let a process that `map` starts end with its parent, free the parent's lock, and leave Ctrl-C to it."""
    if _held:
        end_with_parent(os.getppid())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for file in _held:
            os.close(file.fileno())
        _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def children_leave(lock: TextIO) -> Iterator[None]:
    """Let processes that are started inside the block end with this one, and not hold its lock."""
    _held.append(lock)
    try:
        yield
    finally:
        _held.remove(lock)


def files_in(folder: Path) -> set[Any]:
    """Return what differs whenever something in a folder was written: sizes and times of its files."""
    found = set[Any]()
    with contextlib.suppress(FileNotFoundError):  # it is at its end
        for path in folder.rglob("*"):
            status = path.stat()
            found.add((path, status.st_size, status.st_mtime_ns))
    return found


class Follow:
    """Follows the files that `map` writes into `folder`, and its processes."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self._folder, self._timeout_seconds, self._stuck = folder, timeout_seconds, ""
        self._noted = set[tuple[str, int]]()
        with contextlib.suppress(OSError, ValueError, TypeError):
            for line in (folder / _NOTED).read_text(encoding="utf-8").splitlines():
                name, size = json.loads(line)
                self._noted.add((name, size))
        self._kept = set[str]()

    def keep_whole(self) -> None:
        """Remove what an earlier process left that is not whole."""
        for path in self._folder.iterdir():
            if path.is_file() and (path.name, path.stat().st_size) not in self._noted:
                path.unlink()
            elif path.is_file():
                self._kept.add(path.name)

    def were_there(self, paths: Sequence[Path]) -> bool:
        """Return whether an earlier process wrote these files."""
        return {path.name for path in paths} <= self._kept

    def note(self, paths: Sequence[Path]) -> None:
        """Bring files to the disk and note that they are whole."""
        for path in paths:
            entry = (path.name, path.stat().st_size)
            if entry not in self._noted:
                sync(path)
                with (self._folder / _NOTED).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
                self._noted.add(entry)

    @contextlib.contextmanager
    def of(self, processes: int) -> Iterator[None]:
        """Follow a `map` of so many processes; RankError where one was killed, or none does anything for too long."""
        if processes == 1:
            yield
            return
        done, before = threading.Event(), set(_children())
        thread = threading.Thread(target=self._look, args=(done, before), daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            expected, got = "all processes that prepare data to live", "one that was killed, perhaps for its memory"
            remedy = "Take fewer with {workers}; what is prepared stays, and the same command continues."
            if self._stuck:
                expected, got = (
                    f"progress of the processes that prepare data in {self._timeout_seconds:g} s",
                    self._stuck,
                )
                remedy = "Check whether it is stopped and its disk answers; the same command continues."
            raise RankError("prepare", expected=expected, got=got, remedy=remedy) from None
        finally:
            done.set()
            thread.join()

    def _look(self, done: threading.Event, before: set[int]) -> None:
        seen, still = dict[int, str](), 0.0
        while not done.wait(_LOOK_SECONDS):
            states = {child: _state(child) for child in _children() if child not in before}
            still = still + _LOOK_SECONDS if states and states == seen else 0.0
            seen = states
            if not states:  # before they are started: a fork beside other work of this thread is not asked for
                continue
            with contextlib.suppress(OSError):
                self.note([path for path in self._folder.glob("rows-*.arrow") if path.is_file()])
            if still > self._timeout_seconds:
                stopped = [child for child, state in states.items() if state.rpartition(")")[2].split()[0] in "TD"]
                self._stuck = f"none (of process {', '.join(map(str, stopped or states))})"
                for child in states:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                return


def _children() -> list[int]:
    """Return the processes that this one started. Linux only; elsewhere none."""
    found = list[int]()
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def _state(process: int) -> str:
    """Return what differs whenever a process has done anything: times and page faults."""
    try:
        return Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
