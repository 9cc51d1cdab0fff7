"""Records of the bytes in use during a pass, between marks: by tensor, or by a GPU's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lengthwise.engine.live_bytes import LiveBytes

Segment = list[tuple[object, int]]
"""Operations between two marks, and the bytes in use after each."""


class ByteWatch(Protocol):
    """Records bytes between marks."""

    segments: list[Segment]
    is_quiet: bool

    def mark(self) -> None:
        """End a segment."""


class LiveWatch(LiveBytes):
    """Records the bytes of live tensors after each operation."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__(*before)
        self.segments: list[Segment] = [[]]
        self.is_quiet = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note the bytes."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.is_quiet:
            self.segments[-1].append((func, self.now_bytes))
        return result

    def mark(self) -> None:
        """End a segment and begin another."""
        self.segments[-1].append((None, self.now_bytes))
        self.segments.append([])


class CudaWatch:
    """Records the peak of bytes requested from the device's allocator between marks.

    Requested bytes, not allocated blocks: a block of more than 1 MB may have 1 MB too many, as much as a tensor of a
    small pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, is_torch = device, torch.cuda.get_allocator_backend() == "native"
        self._counted = "requested_bytes.all" if is_torch else "allocated_bytes.all"  # others count no requests
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)  # lets the allocator reclaim blocks that streams have finished with
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_stats(device)[f"{self._counted}.current"]
        self.segments: list[Segment] = []
        self.is_quiet = False

    def __enter__(self) -> CudaWatch:
        """Return the watch, which has begun."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the last segment."""
        self.mark()

    def mark(self) -> None:
        """End a segment: note its peak and the bytes at its end."""
        held = torch.cuda.memory_stats(self._device)
        self.segments.append([(None, held[f"{self._counted}.{when}"] - self._before) for when in ("peak", "current")])
        torch.cuda.reset_peak_memory_stats(self._device)
