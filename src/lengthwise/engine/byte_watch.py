"""The bytes that exist: of live tensors on any device, and noted between the marks of a pass.

A pass notes them tensor by tensor, or as a GPU's allocator counts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.offload import ActivationSaver


class LiveBytes(TorchDispatchMode):
    """Counts once each storage that operations inside the block make, until it is freed.

    Storages that existed before (parameters, flat gradients) do not count, unless they were empty: those of sharded
    units count while they are gathered.
    """

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.peak_bytes = self._made_bytes = 0
        storages = {each._cdata: each for each in (tensor.untyped_storage() for tensor in before)}
        self._known, self._empty = {*storages}, [storage for storage in storages.values() if not storage.nbytes()]

    @property
    def now_bytes(self) -> int:
        """Live bytes."""
        return self._made_bytes + sum(each.nbytes() for each in self._empty)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note the storages of what it returns."""
        there = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *(kwargs or {}).values()))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((result,)):
            self._note(tensor, there)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def _note(self, tensor: Tensor, there: set[int]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in there or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._made_bytes += storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._made_bytes -= size


class Step(NamedTuple):
    """An operation, the live bytes after it, and the part of them that autograd saved for backward."""

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
    """Records the peak of the bytes requested from the device's allocator since the last note.

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


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results; torch's own walk of trees is slow."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
