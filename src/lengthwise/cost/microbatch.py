"""Bytes of a microbatch on a rank, from what it held at each of its moments in two small passes.

At one moment the bytes grow linearly with the rows, so two passes give the line of each moment; the peak is the highest
line, another one for few rows than for many. Offload takes away the first bytes that autograd saved, and backward has a
window of them back early. A rank of a stage keeps other microbatches beside the one that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import kept_ratio

WINDOW_LAYERS = 2  # that backward may have on the device beyond the layer it is at, as plans count


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Bytes on the device at moments of a pass, (moments, 3): of no row, per row, per row of a loss's chunk.

    live: all bytes that the microbatch made. removable: the part that autograd saved and backward has not reached.
    """

    live: NDArray[np.float64]
    removable: NDArray[np.float64]

    def at(self, rows: Sequence[float], *, away: float = 0.0, window: float = 0.0) -> NDArray[np.float64]:
        """Return the bytes at each moment, (moments,), with `away` bytes offloaded and at most `window` of them back.

        rows: (1, rows, rows of a chunk).
        """
        live = self.live @ rows
        removable = np.maximum(0.0, self.removable @ rows)
        gone = np.minimum(removable, away)
        return live - gone + np.minimum(gone, np.maximum(0.0, window - (removable - gone)))


class HeldBytes(NamedTuple):
    """Bytes of a microbatch on the device: peaks of forward and backward, and kept between them.

    returned: kept bytes that return while the pass before its backward runs. leaving: bytes that may be on their way to
    a store.
    """

    forward: float
    backward: float
    kept: float
    returned: float
    leaving: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBytes:
    """Bytes of a microbatch in some layers, by its rows with padding; without parameters and gradients.

    saved_fixed, saved_a_row: bytes that autograd saves of the layers. forward, backward: all bytes at each moment, None
    if not measured. chunk_rows: rows per chunk of the loss. whole: bytes with all logits at once, for fewer rows.
    is_last: True for a model's last layers, of which two stay on the device; all others may be offloaded, as their
    backward comes later. scan_rows: multiple of rows for which scans compute whole chunks.
    """

    layers: int
    saved_fixed: float
    saved_a_row: float
    forward: Moments | None = None
    backward: Moments | None = None
    chunk_rows: float = inf
    whole: MicrobatchBytes | None = None
    is_last: bool = True
    scan_rows: int = 1

    def saved(self, rows: int) -> int:
        """Return the bytes that autograd saves of the layers."""
        return round(self.saved_fixed + self.saved_a_row * self._computed(rows))

    def leaving(self, rows: int, leaving_bytes: int) -> int:
        """Bound the bytes on their way to a store, still on the device: a layer, and at most what the store allows."""
        return min(leaving_bytes, self.saved(rows) // self.layers)

    def away(self, rows: int, offload: float) -> float:
        """Return the bytes that are offloaded at a ratio."""
        return (1 - kept_ratio(offload, self.layers) if self.is_last else offload) * self.saved(rows)

    def window(self, rows: int) -> float:
        """Return the bytes that backward may have back early."""
        return WINDOW_LAYERS * self.saved(rows) / self.layers

    def held(self, rows: int, offload: float, leaving_bytes: int) -> HeldBytes:
        """Return the bytes on the device at a ratio of offload, to a store that allows `leaving_bytes`."""
        if self.whole is not None and rows <= self.chunk_rows:
            return self.whole.held(rows, offload, leaving_bytes)
        assert self.forward is not None, "only what is saved was measured"
        assert self.backward is not None, "only what is saved was measured"
        away, window, leaving = self.away(rows, offload), self.window(rows), self.leaving(rows, leaving_bytes)
        computed = self._computed(rows)
        of_rows = (1.0, computed, min(computed, self.chunk_rows))
        return HeldBytes(
            forward=self.forward.at(of_rows, away=max(0.0, away - leaving)).max(),
            backward=self.backward.at(of_rows, away=away, window=window).max(),
            kept=self.forward.at(of_rows, away=away)[-1],
            returned=min(away, max(0.0, window - (self.saved(rows) - away))),
            leaving=leaving,
        )

    def _computed(self, rows: int) -> int:
        return -(-rows // self.scan_rows) * self.scan_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBeside:
    """A pass of a microbatch through a chunk of layers, and the tensors that the rank holds beside it.

    kept: numbers of microbatches between forward and backward, by chunk. returned: chunks whose activations have begun
    to return. hidden: number of hidden states, or their gradients, that were sent or have arrived.
    """

    chunk: int = 0
    is_forward: bool = True
    kept: tuple[tuple[int, int], ...] = ()
    returned: tuple[int, ...] = ()
    hidden: int = 0


_OF_A_WHOLE_MODEL = (PassBeside(), PassBeside(is_forward=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongKernelBytes:
    """Bytes that the attention kernel of long sequences takes beyond that of small passes, from `least_rows` rows."""

    least_rows: float = inf
    fixed: float = 0.0
    a_row: float = 0.0

    def at(self, rows: int) -> float:
        """Return the bytes in a microbatch of `rows` rows, which may be one sequence."""
        return max(0.0, self.fixed + self.a_row * rows) if rows >= self.least_rows else 0.0


_ONE_KERNEL = LongKernelBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of a rank's microbatches at each pass of a step, without parameters and gradients.

    layers: number of the model's layers. chunks: chunks of the rank's layers, by number. passes: passes of a step.
    hidden_a_row: bytes per row that a stage sends. long_kernel: bytes added to every peak, of whatever moment.
    """

    layers: int
    chunks: Mapping[int, MicrobatchBytes]
    passes: Sequence[PassBeside] = _OF_A_WHOLE_MODEL
    hidden_a_row: float = 0.0
    long_kernel: LongKernelBytes = _ONE_KERNEL

    def peak(self, rows: int, offload: float = 0.0, *, leaving_bytes: int = 0) -> int:
        """Return the most bytes on the device with microbatches of `rows` rows.

        offload: offload ratio of every microbatch. leaving_bytes: bytes that its store allows in flight.
        """
        of_chunk = {number: each.held(rows, offload, leaving_bytes) for number, each in self.chunks.items()}
        peak = 0.0
        for each in self.passes:
            own = of_chunk[each.chunk]
            held = (own.forward if each.is_forward else own.backward) + each.hidden * self.hidden_a_row * rows
            held += sum(number * of_chunk[chunk].kept for chunk, number in each.kept)
            held += sum(of_chunk[chunk].returned for chunk in each.returned)
            if each.kept and offload and not each.is_forward:
                held += max(of_chunk[chunk].leaving for chunk, _ in each.kept)
            peak = max(peak, held)
        return round(peak + self.long_kernel.at(rows))
