"""Bytes of a microbatch on a rank, from what it held at each of its moments in two small passes.

At one moment what is there grows in a line with the rows, so two passes give each line exactly; the peak is the highest
line, another one for few rows than for many. Offload takes away the first bytes that autograd saved, and backward has a
window of them back early. A rank of a pipeline's stage keeps other microbatches beside the one that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import kept_ratio

WINDOW_LAYERS = 2  # what backward may have on the device beyond the layer it is at, as plans count it


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What is on the device at moments of a pass, each (moments, 2): bytes of no row, and of each row.

    live: all that the microbatch made. removable: of it, what is kept for backward alone; None: not measured.
    """

    live: NDArray[np.float64]
    removable: NDArray[np.float64] | None = None

    def left(self, rows: int, *, away: float = 0.0) -> float:
        """Return what is there at the end of the pass, `away` bytes of it offloaded."""
        live = float(self.live[-1] @ (1.0, rows))
        if not away:
            return live
        assert self.removable is not None, "offload was not measured"
        return live - min(away, max(0.0, float(self.removable[-1] @ (1.0, rows))))

    def peak(self, rows: int, *, away: float = 0.0, window: float = 0.0) -> float:
        """Return the highest of the lines at so many rows, `away` bytes of it offloaded and at most `window` back."""
        live = self.live @ (1.0, rows)
        if not away:
            return float(live.max())
        assert self.removable is not None, "offload was not measured"
        removable = np.maximum(0.0, self.removable @ (1.0, rows))
        gone = np.minimum(removable, away)
        back = np.minimum(gone, np.maximum(0.0, window - (removable - gone)))
        return float((live - gone + back).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBytes:
    """Bytes of a microbatch of so many rows in some layers, padding included, without parameters and gradients.

    saved_fixed, saved_a_row: what autograd saves of the layers. forward, backward: all that there is (None: unknown).
    most_rows: up to which these hold; `beyond` has those of more rows, whose loss is made in chunks. is_last: whether
    they are a model's last layers, of which two stay on the device: of others all may be offloaded, as their backward
    comes later.
    """

    layers: int
    saved_fixed: float
    saved_a_row: float
    forward: Moments | None = None
    backward: Moments | None = None
    most_rows: float = float("inf")
    beyond: MicrobatchBytes | None = None
    is_last: bool = True

    def saved(self, rows: int) -> int:
        """Return what autograd saves of the layers."""
        return round(self.saved_fixed + self.saved_a_row * rows)

    def leaving(self, rows: int, leaving_bytes: int) -> int:
        """Bound what may be on its way to a store, and on the device still: a layer, and what the store allows."""
        return min(leaving_bytes, self.saved(rows) // self.layers)

    def away(self, rows: int, offload: float) -> float:
        """Return the bytes that are offloaded at a ratio."""
        return (1 - kept_ratio(offload, self.layers) if self.is_last else offload) * self.saved(rows)

    def window(self, rows: int) -> float:
        """Return the bytes that backward may have back early."""
        return WINDOW_LAYERS * self.saved(rows) / self.layers

    def held(self, rows: int, offload: float, leaving_bytes: int) -> HeldBytes:
        """Return what there is on the device at a ratio of offload, to a store that allows `leaving_bytes`."""
        if rows > self.most_rows and self.beyond is not None:
            return self.beyond.held(rows, offload, leaving_bytes)
        assert self.forward is not None, "only what is saved was measured"
        assert self.backward is not None, "only what is saved was measured"
        away, window, leaving = self.away(rows, offload), self.window(rows), self.leaving(rows, leaving_bytes)
        return HeldBytes(
            forward=self.forward.peak(rows, away=max(0.0, away - leaving)),
            backward=self.backward.peak(rows, away=away, window=window),
            kept=self.forward.left(rows, away=away),
            returned=min(away, max(0.0, window - (self.saved(rows) - away))),
            leaving=leaving,
        )


class HeldBytes(NamedTuple):
    """Bytes of a microbatch on the device: the most in forward and in backward, and between these `kept`.

    returned: what of it comes back while the pass before its backward runs. leaving: what may be on its way to a store.
    """

    forward: float
    backward: float
    kept: float
    returned: float
    leaving: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBeside:
    """A pass of a microbatch through a chunk of layers, and what a rank has beside it.

    kept: numbers of microbatches between forward and backward, by chunk. returned: chunks whose activations have begun
    to come back. hidden: hidden states, or gradients of them, that were sent or have arrived.
    """

    chunk: int = 0
    is_forward: bool = True
    kept: tuple[tuple[int, int], ...] = ()
    returned: tuple[int, ...] = ()
    hidden: int = 0


_OF_A_WHOLE_MODEL = (PassBeside(), PassBeside(is_forward=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of the microbatches of a rank at each pass of a step, without parameters and gradients.

    layers: of the whole model. chunks: of layers that the rank has, by number. passes: what a step runs, and keeps
    beside it. hidden_a_row: of what a stage sends.
    """

    layers: int
    chunks: Mapping[int, MicrobatchBytes]
    passes: Sequence[PassBeside] = _OF_A_WHOLE_MODEL
    hidden_a_row: float = 0.0

    @property
    def most_rows(self) -> float:
        """Above so many rows the loss is made in chunks."""
        return min(each.most_rows for each in self.chunks.values())

    def peak(self, rows: int, offload: float = 0.0, *, leaving_bytes: int = 0) -> int:
        """Return the most bytes on the device with microbatches of so many rows.

        offload: ratio of them. leaving_bytes: that their store allows on the way to it.
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
        return round(peak)
