"""The bytes of live tensors on any device: what a forward leaves for its backward, and the peak of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts every storage that operations inside the block make, once, until it is freed.

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


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results; torch's own walk of trees is slow."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
