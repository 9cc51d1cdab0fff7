"""What a simulated step took: one row for each rank and microbatch, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step; entry i of the arrays is one rank in one microbatch, in the plan's order, times in seconds.

    rank, microbatch: which. start: when all ranks of the microbatch were free. forward, end: when this rank was done
    with its forward and its backward pass. compute: its arithmetic and launches. copied: time that copies to and from
    the host held it up. held_tokens: what it held.
    fill_seconds: filling and draining of each rank's pipeline. step_end_seconds: the reduction that all ranks enter
    together. loader_seconds: waiting for data before the first microbatch.
    """

    ranks: int
    rank: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start: NDArray[np.float64]
    forward: NDArray[np.float64]
    end: NDArray[np.float64]
    compute: NDArray[np.float64]
    copied: NDArray[np.float64]
    held_tokens: NDArray[np.float64]
    fill_seconds: NDArray[np.float64]
    step_end_seconds: float
    loader_seconds: float

    @property
    def work_end_seconds(self) -> NDArray[np.float64]:
        """When each rank is done with its last microbatch, its pipeline drained."""
        ends = np.full(self.ranks, self.loader_seconds)
        np.maximum.at(ends, self.rank, self.end)
        return ends + self.fill_seconds

    @property
    def step_seconds(self) -> float:
        """The whole step, reduction included."""
        return float(self.work_end_seconds.max()) + self.step_end_seconds

    @property
    def compute_ratio(self) -> float:
        """Share of all ranks' time that is arithmetic, 0 to 1."""
        return float(self.compute.sum()) / self._all

    @property
    def exposed_ratio(self) -> float:
        """Share of all ranks' time in which a rank in a microbatch waits for transfers, copies or its ring."""
        return float((self.end - self.start - self.compute).sum()) / self._all

    @property
    def idle_ratio(self) -> float:
        """Share of all ranks' time outside microbatches and the step's end: waiting for others, pipelines filling."""
        return max(0.0, 1.0 - (float((self.end - self.start).sum()) + self.ranks * self.step_end_seconds) / self._all)

    @property
    def most_held_tokens(self) -> float:
        """The most tokens that any rank held at once."""
        return float(self.held_tokens.max(initial=0.0))

    @property
    def _all(self) -> float:
        return self.ranks * self.step_seconds
