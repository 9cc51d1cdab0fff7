"""What exists on the way of a pass, noted between marks: tensor by tensor, or as a GPU's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lengthwise.engine.live_bytes import LiveBytes
from lengthwise.offload import ActivationSaver


class Step(NamedTuple):
    """An operation, the bytes that are live after it, and of them those that are saved and wait for backward."""

    operation: object
    live: int
    waiting: int


Segment = list[Step]
"""Operations between two marks."""


class LiveWatch(LiveBytes):
    """Notes the bytes of live tensors after each operation."""

    def __init__(self, *before: Tensor, saver: ActivationSaver) -> None:
        super().__init__(*before)
        self.segments: list[Segment] = [[]]
        self._saver = saver

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._note_step(func)
        return result

    def note(self) -> None:
        """Do nothing: every operation is noted."""

    def mark(self) -> None:
        """End a segment and begin another."""
        self._note_step(None)
        self.segments.append([])

    def _note_step(self, operation: object) -> None:
        self.segments[-1].append(Step(operation, self.now_bytes, self._saver.waiting_bytes))


class AllocatorWatch:
    """Notes the most bytes that were requested from the device's allocator since the last note.

    Requested bytes, not blocks: a block of more than 1 MB may be 1 MB larger, as much as a tensor of a small pass.
    """

    def __init__(self, device: torch.device, saver: ActivationSaver) -> None:
        self._device, self._saver, is_torch = device, saver, torch.cuda.get_allocator_backend() == "native"
        self._counted = "requested_bytes.all" if is_torch else "allocated_bytes.all"  # which others do not count
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)  # lets the allocator take back blocks that streams have done with
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_stats(device)[f"{self._counted}.current"]
        self.segments: list[Segment] = [[]]

    def __enter__(self) -> AllocatorWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def note(self) -> int:
        """Note the peak since the last note; return the bytes that exist now."""
        held = torch.cuda.memory_stats(self._device)
        peak, now = (held[f"{self._counted}.{when}"] - self._before for when in ("peak", "current"))
        self.segments[-1].append(Step(None, peak, self._saver.waiting_bytes))
        torch.cuda.reset_peak_memory_stats(self._device)
        return now

    def mark(self) -> None:
        """End a segment and begin another."""
        self._end()
        self.segments.append([])

    def _end(self) -> None:
        self.segments[-1].append(Step(None, self.note(), self._saver.waiting_bytes))
