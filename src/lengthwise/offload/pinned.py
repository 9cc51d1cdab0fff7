"""Activations in pinned host memory of a GPU: slabs of powers of two, kept for the run, and one stream each way.

A copy out begins once the compute stream has made the values, a copy in once that stream has freed its destination;
only the compute stream waits for a copy in. Its tests ran on one H200 on 2026-11-26.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from lengthwise.core.errors import MemoryShortage
from lengthwise.offload.store import StoreRoom

SLAB_BYTES = 1 << 28
LEAVING_BYTES = 1 << 29  # limit of values whose copy out is under way: half a layer of a large model at 64K tokens
_ALIGNMENT = 512


class PinnedStore:
    """An `ActivationStore` in host memory, for a GPU."""

    def __init__(self, device: torch.device, *, where: str) -> None:
        assert device.type == "cuda", f"activations on {device} are already in host memory"
        self.device, self._where = device, where
        self.out_stream, self.in_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._slabs: list[Tensor] = []
        self._room = StoreRoom(_ALIGNMENT)  # over all slabs, one after the other
        self.leaving_bytes = LEAVING_BYTES
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited_seconds = 0.0

    @property
    def waited_seconds(self) -> float:
        """Seconds that the compute stream has waited for copies in; reading it waits for the GPU."""
        for before, after in self._waits:
            after.synchronize()
            self._waited_seconds += before.elapsed_time(after) / 1e3
        self._waits.clear()
        return self._waited_seconds

    def put(self, values: Tensor) -> _Pinned:
        while self._leaving and (self._leaving[0][0].query() or self._leaving_bytes > self.leaving_bytes):
            self._leaving.popleft()[0].synchronize()
        place = self._room.take(values.numel())
        parts = self._parts(place, values.numel())
        self.out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out_stream):
            start = 0
            for part in parts:
                part.copy_(values[start : start + part.numel()], non_blocking=True)
                start += part.numel()
        values.record_stream(self.out_stream)
        done = torch.cuda.Event()
        done.record(self.out_stream)
        self._leaving.append((done, values))
        return _Pinned(self, parts, done, place)

    def note_wait(self, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        """Count the time between two events of the compute stream as waiting."""
        self._waits.append((before, after))

    def free(self, stored: Iterable[_Pinned]) -> None:
        """Free the space of these entries; keep the slabs.

        Later entries may reuse it at once: their copy starts after the compute stream has waited for the copies in.
        """
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        for each in stored:
            self._room.give(each.place, each.size)

    def close(self) -> None:
        """Release the slabs without waiting; torch's allocators keep memory until its copies have ended."""
        self._leaving.clear()
        self._slabs.clear()

    @property
    def _leaving_bytes(self) -> int:
        return sum(values.numel() for _, values in self._leaving)

    def _parts(self, place: int, size: int) -> list[Tensor]:
        parts, stop = [], place + size
        while place < stop:
            slab, start = divmod(place, SLAB_BYTES)
            while slab >= len(self._slabs):
                self._slabs.append(self._new_slab(size))
            part = self._slabs[slab][start : start + stop - place]
            parts.append(part)
            place += part.numel()
        return parts

    def _new_slab(self, size: int) -> Tensor:
        try:
            return torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # torch has no class of its own for this
            held = len(self._slabs) * SLAB_BYTES
            expected = f"pinned host memory for {size} bytes of activations, beside {held} of this rank"
            remedy = "Offload less (more ranks, or offload.ratio), or set offload.store: disk."
            got = (str(error).splitlines() or ["an error"])[0].rstrip(".")
            raise MemoryShortage(f"{self._where}, offload", expected=expected, got=got, remedy=remedy) from error


class _Pinned:
    def __init__(self, store: PinnedStore, parts: list[Tensor], copied: torch.cuda.Event, place: int) -> None:
        self._store, self._parts, self._copied, self.place = store, parts, copied, place
        self.size = sum(part.numel() for part in parts)
        self._values: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        if self._values is not None:
            return
        store, compute = self._store, torch.cuda.current_stream(self._store.device)
        # Allocated on the compute stream, which frees it and may still read this memory's previous contents.
        self._values = torch.empty(self.size, dtype=torch.uint8, device=store.device)
        store.in_stream.wait_stream(compute)
        store.in_stream.wait_event(self._copied)
        with torch.cuda.stream(store.in_stream):
            start = 0
            for part in self._parts:
                self._values[start : start + part.numel()].copy_(part, non_blocking=True)
                start += part.numel()
        self._values.record_stream(store.in_stream)  # if dropped untaken, the memory stays until the copy has ended
        self._arrived = torch.cuda.Event()
        self._arrived.record(store.in_stream)

    def take(self) -> Tensor:
        self.fetch()
        values, arrived = self._values, self._arrived
        assert values is not None, "it was just begun"
        assert arrived is not None, "it was just begun"
        compute = torch.cuda.current_stream(self._store.device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(arrived)
        after.record(compute)
        self._store.note_wait(before, after)
        self._values = self._arrived = None
        return values
