"""What exists on the way of a pass, noted between marks: tensor by tensor, or as a GPU's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lengthwise.engine.live_bytes import LiveBytes

Segment = list[tuple[object, int]]
"""Operations and the bytes that existed after each, between two marks."""


class LiveWatch(LiveBytes):
    """Notes the bytes of live tensors after each operation."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__(*before)
        self.segments: list[Segment] = [[]]
        self._is_quiet = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self._is_quiet:
            self.segments[-1].append((func, self.now_bytes))
        return result

    def mark(self) -> None:
        """End a segment and begin another."""
        self.segments[-1].append((None, self.now_bytes))
        self.segments.append([])

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Note no operations inside the block."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False


class AllocatorWatch:
    """Notes the most bytes that were requested from the device's allocator between marks.

    Requested bytes, not blocks: a block of more than 1 MB may be 1 MB larger, as much as a tensor of a small pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, is_torch = device, torch.cuda.get_allocator_backend() == "native"
        self._counted = "requested_bytes.all" if is_torch else "allocated_bytes.all"  # which others do not count
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)  # lets the allocator take back blocks that streams have done with
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_stats(device)[f"{self._counted}.current"]
        self.segments: list[Segment] = []
        self.quiet = nullcontext

    def __enter__(self) -> AllocatorWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.mark()

    def mark(self) -> None:
        """End a segment: note its peak, and the bytes at its end."""
        held = torch.cuda.memory_stats(self._device)
        self.segments.append([(None, held[f"{self._counted}.{when}"] - self._before) for when in ("peak", "current")])
        torch.cuda.reset_peak_memory_stats(self._device)
