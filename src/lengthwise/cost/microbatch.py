"""Bytes of a microbatch on a rank, from what it held at each of its moments in two small passes.

At one moment what is there grows in a line with the rows, so two passes give each line exactly; the peak is the highest
line, another one for few rows than for many. Offload takes away the first bytes that autograd saved, and backward has a
window of them back early.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Bytes of a microbatch of so many rows, padding included; parameters and gradients are left out.

    saved_fixed, saved_a_row: what autograd saves of the layers. forward, backward: all that there is (None: unknown).
    most_rows: up to which these hold; `beyond` has those of more rows, whose loss is made in chunks.
    """

    layers: int
    saved_fixed: float
    saved_a_row: float
    forward: Moments | None = None
    backward: Moments | None = None
    most_rows: float = float("inf")
    beyond: MicrobatchBytes | None = None

    def saved(self, rows: int) -> int:
        """Return what autograd saves of the layers."""
        return round(self.saved_fixed + self.saved_a_row * rows)

    def leaving(self, rows: int, leaving_bytes: int) -> int:
        """Bound what may be on its way to a store, and on the device still: a layer, and what the store allows."""
        return min(leaving_bytes, self.saved(rows) // self.layers)

    def peak(self, rows: int, offload: float = 0.0, *, leaving_bytes: int = 0) -> int:
        """Return the most that is on the device where a ratio is offloaded, to a store that allows `leaving_bytes`."""
        if rows > self.most_rows and self.beyond is not None:
            return self.beyond.peak(rows, offload, leaving_bytes=leaving_bytes)
        assert self.forward is not None, "only what is saved was measured"
        assert self.backward is not None, "only what is saved was measured"
        saved = self.saved(rows)
        away = (1 - kept_ratio(offload, self.layers)) * saved
        forward = self.forward.peak(rows, away=max(0.0, away - self.leaving(rows, leaving_bytes)))
        return round(max(forward, self.backward.peak(rows, away=away, window=WINDOW_LAYERS * saved / self.layers)))
