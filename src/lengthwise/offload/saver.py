"""The tensors that autograd saves of one microbatch; the first `offload_bytes` of them go to a store.

Each storage is one entry, however many tensors view it. In forward, entries go out until `offload_bytes` are in the
store, the last one in part; in backward they return in reverse order, within `window_bytes`. Parameters, buffers and
tensors under 1 KB stay, and so do storages that later layers save again (rotary embeddings). Copies keep every bit, so
gradients are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lengthwise.offload.store import ActivationStore, Stored

SMALL_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTotals:
    """The bytes that autograd saved of a microbatch, in distinct storages, and those that were offloaded."""

    saved_bytes: int
    offloaded_bytes: int


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class _Entry:
    """A storage that autograd saves: on the device (`values`), or in the store except for `rest`."""

    alive: StorageWeakRef  # keeps another storage from getting the same address
    number: int
    size: int
    saved_before: int  # bytes of the microbatch
    values: Tensor | None = None
    stored: Stored | None = None
    rest: Tensor | None = None
    is_fetched: bool = False
    is_reached: bool = False

    @property
    def away_bytes(self) -> int:
        return self.size - (0 if self.rest is None else self.rest.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedView:
    """A saved tensor as a view of an entry. kept: the tensor itself if its entry stayed, else None."""

    entry: _Entry
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    kept: Tensor | None = field(repr=False)


class ActivationSaver:
    """The saved activations of one microbatch on one rank.

    store: store of offloaded activations; None only counts them. offload_bytes: number of bytes to offload.
    layer_bytes: bytes of one layer; a storage saved again after that many bytes is shared by layers. window_bytes:
    largest number of bytes loaded ahead of backward. stays: storages that are never offloaded (`parameter_storages`).
    """

    def __init__(
        self,
        store: ActivationStore | None,
        *,
        stays: frozenset[int],
        offload_bytes: int = 0,
        layer_bytes: int = 0,
        window_bytes: int = 0,
    ) -> None:
        self._store, self._stays = store, stays
        self._least_bytes = 1 if store is None else SMALL_BYTES
        self._offload_bytes, self._layer_bytes, self._window_bytes = offload_bytes, layer_bytes, window_bytes
        # Only autograd keeps entries alive, so backward frees each as soon as it is used.
        self._entries: weakref.WeakValueDictionary[tuple[int, int], _Entry] = weakref.WeakValueDictionary()
        self._away: list[weakref.ref[_Entry]] = []
        self._put: list[Stored] = []
        self._saved_bytes = self._away_bytes = self._waiting_bytes = self._numbered = 0

    @property
    def totals(self) -> ActivationTotals:
        """Bytes that forward has saved, and bytes in the store."""
        return ActivationTotals(saved_bytes=self._saved_bytes, offloaded_bytes=self._away_bytes)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of saved storages, on the device or on their way back, that backward has not reached."""
        return self._waiting_bytes

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save and offload the tensors that forward inside the block saves."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Tensor | _SavedView:
        """Return the value that autograd keeps in place of `tensor`; `unpack` restores the tensor."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        alive = StorageWeakRef(tensor.untyped_storage())
        if tensor.untyped_storage().nbytes() < self._least_bytes or alive.cdata in self._stays:
            return tensor
        entry = self._entries.get((alive.cdata, tensor._version))
        if entry is None:
            entry = self._enter(tensor, alive)
        elif entry.stored is not None and self._saved_bytes - entry.saved_before > self._layer_bytes:
            self._away_bytes -= entry.away_bytes
            self._waiting_bytes += entry.away_bytes
            entry.stored, entry.rest, entry.values = None, None, _flat(tensor)
        return _SavedView(
            entry=entry,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            # Detached: a function that saves its own output would keep itself alive if no backward ran.
            kept=tensor.detach() if entry.stored is None else None,
        )

    def unpack(self, saved: Tensor | _SavedView) -> Tensor:
        """Return a saved tensor, with values from the store if they are there."""
        if isinstance(saved, Tensor):
            return saved
        entry = saved.entry
        if not entry.is_reached:
            entry.is_reached = True
            self._bring_back(entry)
        if saved.kept is not None:
            return saved.kept
        assert entry.values is not None, "an entry that was reached is on the device"
        empty = torch.empty(0, dtype=saved.dtype, device=entry.values.device)
        return empty.set_(entry.values.untyped_storage(), saved.offset, saved.size, saved.stride)

    def end(self) -> None:
        """Free the space in the store, after backward."""
        if self._store is not None:
            self._store.free(self._put)
            self._put.clear()

    def prefetch(self) -> None:
        """Begin to load the tensors that backward needs next, within the window."""
        while self._away:
            entry = self._away[-1]()
            if entry is None or entry.stored is None or entry.is_fetched:
                self._away.pop()
                continue
            if self._waiting_bytes + entry.away_bytes > self._window_bytes:
                return
            self._away.pop()
            entry.stored.fetch()
            entry.is_fetched = True
            self._waiting_bytes += entry.away_bytes

    def _enter(self, tensor: Tensor, alive: StorageWeakRef) -> _Entry:
        values = _flat(tensor)
        size = values.numel()
        entry = _Entry(alive=alive, number=self._numbered, size=size, saved_before=self._saved_bytes)
        self._entries[alive.cdata, tensor._version] = entry
        self._numbered += 1
        self._saved_bytes += size
        goes = min(size, self._offload_bytes - self._away_bytes)
        if self._store is not None and goes >= SMALL_BYTES:
            entry.stored = self._store.put(values[:goes])
            entry.rest = values[goes:].clone() if goes < size else None
            self._put.append(entry.stored)
            self._away.append(weakref.ref(entry))
            self._away_bytes += goes
        self._waiting_bytes += size - (0 if entry.stored is None else goes)
        return entry

    def _bring_back(self, entry: _Entry) -> None:
        if entry.stored is not None:
            values = entry.stored.take()
            entry.values = values if entry.rest is None else torch.cat((values, entry.rest))
            self._waiting_bytes -= entry.size if entry.is_fetched else entry.size - entry.away_bytes
            entry.stored = entry.rest = None
        else:
            self._waiting_bytes -= entry.size
        self.prefetch()


def parameter_storages(model: nn.Module) -> frozenset[int]:
    """Return the storages of parameters and buffers, of which autograd saves views."""
    tensors = (*model.parameters(), *model.buffers())
    return frozenset(StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors)


def _flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as uint8 (bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
