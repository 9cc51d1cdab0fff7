"""Room in pinned host memory for messages, and how they are cut to fit it.

torch's allocator rounds pinned memory up to powers of two and keeps it, so a few slabs of one size are used again and
again; what does not fit goes through pageable memory, slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from lengthwise.comm.transport import Message

SLAB_BYTES = 8 << 20  # copies of that size run at full speed
MOST_SLABS = 16


class Slabs:
    """At most `most` pinned slabs of `slab_bytes` each, made when they are first needed."""

    def __init__(
        self,
        *,
        slab_bytes: int = SLAB_BYTES,
        most: int = MOST_SLABS,
        pin: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.slab_bytes = slab_bytes
        self._most, self._pin = most, pin or _pinned
        self._pinned = 0
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        """Return room for the elements of a tensor, in one dimension; at most a slab."""
        size = like.numel() * like.element_size()
        assert size <= self.slab_bytes, f"{size} bytes do not fit a slab of {self.slab_bytes}"
        if not self._free and self._pinned == self._most:
            return torch.empty(like.numel(), dtype=like.dtype)
        if not self._free:
            self._free.append(self._pin(self.slab_bytes))
            self._pinned += 1
        slab = self._free.pop()
        room = slab[:size].view(like.dtype)
        self._lent[room.data_ptr()] = slab
        return room

    def give(self, room: Tensor) -> None:
        """Take room back."""
        slab = self._lent.pop(room.data_ptr(), None)
        if slab is not None:
            self._free.append(slab)

    def chunks(self, tensor: Tensor, *, parts: int = 1) -> list[tuple[int, int]]:
        """Return (start, stop) of the chunks of a tensor of which `parts` at a time fit a slab, in elements."""
        step = max(1, self.slab_bytes // (parts * tensor.element_size()))
        return [(start, min(start + step, tensor.numel())) for start in range(0, tensor.numel(), step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Chunks that travel together: of each peer, and each way, at most one."""

    sends: list[Message]
    receives: list[Message]


def cut_into_rounds(sends: Sequence[Message], receives: Sequence[Message], slabs: Slabs) -> list[Round]:
    """Cut a grouped call into chunks, the i-th between two ranks in round i, so that both sides pair them."""
    return [
        Round(sends=list(filter(None, out)), receives=list(filter(None, into)))
        for out, into in zip_longest(_by_peer(sends, slabs), _by_peer(receives, slabs), fillvalue=())
    ]


def _by_peer(messages: Sequence[Message], slabs: Slabs) -> list[tuple[Message | None, ...]]:
    """Return, round by round, one chunk of each peer's messages, in the given order."""
    chunks: dict[int, list[Message]] = {}
    for tensor, peer in messages:
        assert tensor.is_contiguous(), f"messages must be contiguous, got strides {tensor.stride()}"
        flat = tensor.detach().view(-1)
        chunks.setdefault(peer, []).extend((flat[start:stop], peer) for start, stop in slabs.chunks(flat))
    return list(zip_longest(*chunks.values()))


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
