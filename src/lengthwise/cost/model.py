"""How long a piece takes: five coefficients, one formula, used alike by planner, score and reports.

A piece of d ranks that holds sequences of lengths s_i, with S their sum, keeps each of its ranks busy for

    (q sum s_i^2 + l S) / d  +  max(0, c S (d - 1) / d  -  q sum s_i^2 / d)  +  h (d - 1)

seconds, the last two terms only for d > 1; every microbatch adds g on each of its ranks. The middle term is the part
of the ring's transfers that attention does not hide. In the code q is `quadratic_seconds`, l `linear_seconds`,
g `fixed_seconds`, c `ring_seconds` and h `hop_seconds`. Forward and backward of all layers are counted together.

Where a share of the layers has a sliding window of w tokens, a longer sequence counts there only the pairs that it
sees: 2 s w - w^2 in place of s^2. That these layers also send less round a ring is not counted, so rings of such models
are priced a little high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of forward and backward through the whole model.

    quadratic_seconds: seconds a squared token of attention (a sequence of s tokens counts s x s).
    linear_seconds: seconds a token of everything that grows with tokens: projections, MLP, output head.
    fixed_seconds: seconds a microbatch, on each of its ranks, whatever it holds (launches).
    ring_seconds: seconds to move the keys, values and their gradients of one token over one link.
    hop_seconds: seconds of latency a hop of a ring, transfers of all layers and both passes together.
    windows: (window in tokens, share of the attention layers that have it); the other layers see everything.
    couples_layers: whether ranks of a ring wait for each other in every layer, see `protocol`.
    version: what the coefficients come from; written into every plan made with them.

    Raises:
        ConfigError: a coefficient that is negative or not finite, or all of them zero.
    """

    quadratic_seconds: float = 0.0
    linear_seconds: float = 0.0
    fixed_seconds: float = 0.0
    ring_seconds: float = 0.0
    hop_seconds: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    couples_layers: bool = False
    version: str = "given"

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self) if field.name.endswith("_seconds")]
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(
                    f"cost: {name}",
                    expected="a finite number of seconds, 0 or more",
                    got=repr(value),
                    remedy=f"Give {name} in seconds.",
                )
        if not any(getattr(self, name) for name in names):
            raise ConfigError(
                "cost",
                expected="at least one coefficient above 0",
                got="all coefficients 0",
                remedy="Give linear_seconds and quadratic_seconds, at least.",
            )
        shares = [share for _, share in self.windows]
        if any(window < 1 for window, _ in self.windows) or min(shares, default=0) < 0 or sum(shares) > 1 + 1e-9:
            raise ConfigError(
                "cost: windows",
                expected="windows of at least 1 token, and shares of the layers that sum to at most 1",
                got=repr(self.windows),
                remedy="Mend the windows.",
            )

    def piece_seconds(self, lengths: Sequence[int], degree: int) -> float:
        """Tell how long a piece keeps each of its `degree` ranks busy, the microbatch's `fixed_seconds` left out."""
        total = sum(lengths)
        attention = self.quadratic_seconds * sum(self._pairs(length) for length in lengths)
        seconds = (attention + self.linear_seconds * total) / degree
        if degree > 1:
            transfers = self.ring_seconds * total * (degree - 1)
            seconds += max(0.0, (transfers - attention) / degree) + self.hop_seconds * (degree - 1)
        return seconds

    def compute_seconds(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tell the arithmetic of each sequence alone, in seconds of one rank."""
        tokens = lengths.astype(np.float64)
        if not self.windows:
            return (self.quadratic_seconds * tokens + self.linear_seconds) * tokens
        return self.quadratic_seconds * self.seen_pairs(tokens) + self.linear_seconds * tokens

    def ring_piece_seconds(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> NDArray[np.float64]:
        """Do `piece_seconds` for many pieces of one sequence each: entry i is of `lengths[i]` over `degrees[i]`."""
        tokens = lengths.astype(np.float64)
        attention = self.quadratic_seconds * self.seen_pairs(tokens)
        transfers = self.ring_seconds * tokens * (degrees - 1)
        exposed = np.where(degrees > 1, np.maximum(0.0, transfers - attention), 0.0)
        return (attention + self.linear_seconds * tokens + exposed) / degrees + self.hop_seconds * (degrees - 1)

    def at_speed(self, speed: float) -> CostModel:
        """Return the costs of ranks that compute and launch `speed` times as fast; transfers and hops stay."""
        return replace(
            self,
            quadratic_seconds=self.quadratic_seconds / speed,
            linear_seconds=self.linear_seconds / speed,
            fixed_seconds=self.fixed_seconds / speed,
        )

    def hops_seconds(self, degree: int) -> float:
        """Tell the part of a piece's seconds that depends on its degree alone: the latency of its hops."""
        return self.hop_seconds * (degree - 1)

    def _pairs(self, length: int) -> float:
        seen = float(length * length)
        for window, share in self.windows:
            if window < length:
                seen -= share * (length - window) ** 2  # s^2 - (2 s w - w^2)
        return seen

    def seen_pairs(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Count what attention sees in each sequence, twice, over all layers: s^2 where no window is shorter."""
        seen = tokens * tokens
        for window, share in self.windows:
            seen = seen - share * np.maximum(0.0, tokens - window) ** 2
        return seen
