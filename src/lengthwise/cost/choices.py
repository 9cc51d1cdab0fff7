"""What a piece does beside being cut (heads, offload, recomputation), and what a planner may choose of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from lengthwise.cost.links import Numbers, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings of a piece beside its cut; to price many pieces at once, fields may be arrays with one entry per piece.

    heads: ranks of a group that splits heads, a divisor of the degree and of the model's heads.
    offload: offload ratio of the microbatch, 0 to 1.
    recompute: recomputation of the microbatch, as `core.plan.kinds_by_layer` reads it.
    """

    heads: Numbers = 1
    offload: Numbers = 0.0
    recompute: str = "none"


AS_CUT = Choice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choices of a planner for each piece beside its degree.

    recompute: recomputation of all microbatches.
    splits_heads: True if rings may split heads.
    offloads_above_tokens: capacity above which a rank offloads, inf for never.
    layers: number of the model's layers; the plan file's rule for offload depends on it.
    """

    recompute: str = "none"
    splits_heads: bool = False
    offloads_above_tokens: float = inf
    layers: int = 1

    @property
    def offloads(self) -> bool:
        """Whether a rank may hold more than its device does."""
        return self.offloads_above_tokens < inf

    def offload_needed(self, tokens: Numbers, degrees: Numbers, sequences: int = 1) -> Numbers:
        """Return the least ratio with which each piece fits, by its tokens; cut sequences may round up by a token."""
        if not self.offloads or self.layers <= 2:
            return 0.0 * tokens
        allowed = self.offloads_above_tokens + chosen(degrees > 1, sequences, 0)
        return np.maximum(0.0, (1 - allowed * degrees / tokens) * (self.layers / (self.layers - 2)))
