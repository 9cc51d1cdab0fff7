"""Stores of activations that show what is asked of them: one that counts, one that takes its time; and one outside
of what counters of tensors see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Event = tuple[Literal["put", "fetch", "take"], int]
"""What was asked, and of which put, counted from 0."""


class CountingStore:
    """Keeps bytes as copies in memory, and notes in which order it was asked for what."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.put_bytes = 0
        self.held = 0
        self.waited_seconds = 0.0
        self.leaving_bytes = 0

    def put(self, values: Tensor) -> Kept:
        number = sum(what == "put" for what, _ in self.events)
        self.events.append(("put", number))
        self.put_bytes += values.numel()
        self.held += 1
        return Kept(self, number, values.clone())

    def free(self, stored: Iterable[Kept]) -> None:
        """Forget these."""
        self.held -= len(list(stored))

    def close(self) -> None:
        """Keep what was noted."""


class Kept:
    """Bytes of a `CountingStore`."""

    def __init__(self, store: CountingStore, number: int, values: Tensor) -> None:
        self._store, self._number, self._values, self._fetched = store, number, values, False

    def fetch(self) -> None:
        if not self._fetched:
            self._store.events.append(("fetch", self._number))
            self._fetched = True

    def take(self) -> Tensor:
        self._store.events.append(("take", self._number))
        return self._values


class DelayedStore(CountingStore):
    """As a store whose copies take their time: who takes what was not fetched before would have waited."""

    @property
    def late(self) -> list[int]:
        """Puts that were taken without a fetch before."""
        fetched = {number: place for place, (what, number) in enumerate(self.events) if what == "fetch"}
        takes = {number: place for place, (what, number) in enumerate(self.events) if what == "take"}
        return [number for number, place in takes.items() if fetched.get(number, place) >= place]


class CopyStore:
    """Copies that are no tensors, made at once: they count as off the device where tensors are counted."""

    waited_seconds = 0.0

    def __init__(self) -> None:
        self.leaving_bytes = 0

    def put(self, values: Tensor) -> _Copy:
        return _Copy(values)

    def free(self, stored: Iterable[Any]) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Nothing is kept here."""


class _Copy:
    def __init__(self, values: Tensor) -> None:
        self._bytes, self._device = values.cpu().numpy().tobytes(), values.device
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            fetched = torch.empty(len(self._bytes), dtype=torch.uint8)
            fetched.numpy()[:] = np.frombuffer(self._bytes, dtype=np.uint8)
            self._fetched = fetched.to(self._device)

    def take(self) -> Tensor:
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None, "it was fetched"
        return fetched
