"""Activations in an unnamed file, on any machine: one thread writes, one reads.

The file is unlinked right after it is opened, so the system frees it however the process ends. Space is reserved before
it is written. At most `leaving_bytes` wait in memory to be written, or one larger entry.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lengthwise.core.errors import MemoryShortage
from lengthwise.offload.store import StoreRoom

LEAVING_BYTES = 1 << 26  # 64 MB, a layer of a small model; more only delays the wait for a slow disk
_RESERVED_BYTES = 1 << 26  # the file grows in steps of this size
_ALIGNMENT = 4096


class DiskStore:
    """An `ActivationStore` in a folder; raises MemoryShortage if no file can be created there."""

    def __init__(self, folder: Path, *, where: str) -> None:
        self._folder, self._where = folder, where
        self._room, self._reserved = StoreRoom(_ALIGNMENT), 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise self._shortage(0, error) from error
        self._writer, self._reader = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"offload {name}") for name in ("write", "read")
        )
        self.leaving_bytes = LEAVING_BYTES
        self._unwritten: deque[tuple[Future[None], int]] = deque()
        self._waited_seconds = 0.0

    @property
    def waited_seconds(self) -> float:
        """Seconds that the caller has waited for the disk."""
        return self._waited_seconds

    def put(self, values: Tensor) -> _OnDisk:
        size = values.numel()
        start = self._room.take(size)
        self._reserve(start, size)
        written = self._writer.submit(_write, self._file.fileno(), values.cpu(), start)
        self._unwritten.append((written, size))
        while self._unwritten and (self._unwritten[0][0].done() or self._has_much_to_write()):
            self.wait_for(*self._unwritten.popleft())
        return _OnDisk(self, written, start, size, values.device)

    def read(self, written: Future[None], start: int, size: int) -> Future[Tensor]:
        """Begin to read bytes once they are written; the result is uint8 (size,)."""
        values = torch.empty(size, dtype=torch.uint8)  # on this thread: memory counters ignore other threads' tensors
        return self._reader.submit(_read, self._file.fileno(), written, start, values)

    def wait_for(self, done: Future, size: int) -> object:
        """Return the result of a thread and count the wait; MemoryShortage if the disk failed."""
        start = time.perf_counter()
        try:
            return done.result()
        except OSError as error:
            raise self._shortage(size, error) from error
        finally:
            self._waited_seconds += time.perf_counter() - start

    def flush(self) -> None:
        """Wait until everything put is in the file."""
        while self._unwritten:
            self.wait_for(*self._unwritten.popleft())

    def free(self, stored: Iterable[_OnDisk]) -> None:
        """Free the space of these entries for later ones; the file keeps its size.

        One thread writes, in order, so an earlier write cannot overwrite a later entry.
        """
        for each in stored:
            self._room.give(each.start, each.size)

    def close(self) -> None:
        """End the threads and delete the file."""
        for threads in (self._writer, self._reader):
            threads.shutdown(cancel_futures=True)
        self._file.close()

    def _has_much_to_write(self) -> bool:
        return len(self._unwritten) > 1 and sum(size for _, size in self._unwritten) > self.leaving_bytes

    def _reserve(self, start: int, size: int) -> None:
        """Grow the file so that `size` bytes from `start` on fit, or raise MemoryShortage."""
        end = start + size
        if end <= self._reserved or not hasattr(os, "posix_fallocate"):  # macOS: the write finds a full disk
            return
        for wanted in (max(end, self._reserved + _RESERVED_BYTES), end):  # a whole step, or just enough
            try:
                os.posix_fallocate(self._file.fileno(), self._reserved, wanted - self._reserved)
            except OSError as error:
                if wanted == end:
                    self._room.give(start, size)
                    raise self._shortage(size, error) from error
            else:
                self._reserved = wanted
                return

    def _shortage(self, size: int, error: OSError) -> MemoryShortage:
        try:
            free = f"{shutil.disk_usage(self._folder).free} bytes free"
        except OSError:
            free = "a folder that cannot be read"
        expected = f"room for {size} bytes of activations in {self._folder}, beside {self._room.end} of this rank"
        remedy = "Free disk space, give another offload.path, or offload less: more ranks, or offload.ratio."
        got = f"{error.strerror or error}, {free}"
        return MemoryShortage(f"{self._where}, offload", expected=expected, got=got, remedy=remedy)


class _OnDisk:
    def __init__(self, store: DiskStore, written: Future[None], start: int, size: int, device: torch.device) -> None:
        self._store, self._written, self._device = store, written, device
        self.start, self.size = start, size
        self._read: Future[Tensor] | None = None

    def fetch(self) -> None:
        if self._read is None:
            self._read = self._store.read(self._written, self.start, self.size)

    def take(self) -> Tensor:
        self.fetch()
        assert self._read is not None, "it was just begun"
        values = self._store.wait_for(self._read, self.size)
        assert isinstance(values, Tensor), "what is read is a tensor"
        self._read = None
        return values.to(self._device)


def _write(file: int, values: Tensor, start: int) -> None:
    left = values.numpy().data
    while left:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def _read(file: int, written: Future[None], start: int, values: Tensor) -> Tensor:
    written.result()
    left = values.numpy().data
    while left:
        got = os.preadv(file, [left], start)
        if not got:
            raise OSError(f"the file ended at byte {start}")
        left, start = left[got:], start + got
    return values
