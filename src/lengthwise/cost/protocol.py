"""What planners ask of costs: the few questions that the judge's formula and the costs with all terms both answer.

A piece of d ranks keeps each of them busy for `piece_seconds`; a microbatch adds `fixed_seconds` on each of its ranks.
Two classes answer: `CostModel` (five coefficients, the fast yardstick) and `AllTermsCost` (two links, blocks, offload,
heads, recomputation), which can be asked more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class RingCost(Protocol):
    """Seconds of rings of one sequence, all that the search for degrees asks."""

    @property
    def fixed_seconds(self) -> float:
        """Seconds that a microbatch takes on each of its ranks, whatever it holds."""
        ...

    def ring_piece_seconds(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tell how long many pieces of one sequence each take: entry i is of `lengths[i]` over `degrees[i]` ranks."""
        ...


class Cost(RingCost, Protocol):
    """Seconds of forward and backward through the whole model."""

    @property
    def ring_seconds(self) -> float:
        """Seconds to move what a ring passes on of one token over one link, the slowest; 0: transfers are free."""
        ...

    @property
    def couples_layers(self) -> bool:
        """Whether ranks of a ring wait for the slowest of them in every layer, as they do in engines.

        Local packs beside a ring on some of its ranks then hold up all. False: the plan file's rule, by which each rank
        is busy for the sum of its own pieces.
        """
        ...

    @property
    def version(self) -> str:
        """What the costs come from; written into every plan made with them."""
        ...

    def piece_seconds(self, lengths: Sequence[int], degree: int) -> float:
        """Tell how long a piece keeps each of its `degree` ranks busy, the microbatch's `fixed_seconds` left out."""
        ...

    def compute_seconds(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tell the arithmetic of each sequence alone on one rank, in seconds; no cut makes it less in sum."""
        ...

    def hops_seconds(self, degree: int) -> float:
        """Tell the part of a piece's seconds that depends on its degree alone: the latency of its hops."""
        ...

    def at_speed(self, speed: float) -> Self:
        """Return the costs of ranks that compute and launch `speed` times as fast; what moves between ranks stays."""
        ...
