"""The timeline of a step, simulated or measured: an entry per rank, chunk of layers and microbatch; and its figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of one step; entry i of the arrays is one chunk of layers of one rank in one microbatch.

    A rank of `stages` pipeline stages has that many devices with equally many chunks; without stages it is one chunk.
    rank, stage, microbatch: numbers of the entry's. start, forward: begin and end of its forward pass, in seconds.
    backward, end: begin and end of its backward pass. compute: seconds of arithmetic and overhead. copied: seconds lost
    to copies to and from the host. held_tokens: number of tokens held. step_end_seconds: seconds of the reduction over
    all ranks.
    """

    ranks: int
    stages: int
    rank: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start: NDArray[np.float64]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    end: NDArray[np.float64]
    compute: NDArray[np.float64]
    copied: NDArray[np.float64]
    held_tokens: NDArray[np.float64]
    step_end_seconds: float

    def microbatch_spans(self, microbatches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (begin of microbatch i on its first rank, its end on its last rank), in seconds."""
        starts, ends = np.full(microbatches, np.inf), np.zeros(microbatches)
        np.minimum.at(starts, self.microbatch, self.start)
        np.maximum.at(ends, self.microbatch, self.end)
        return starts, ends

    @property
    def work_end_seconds(self) -> NDArray[np.float64]:
        """Time at which rank r has finished its last microbatch on all its stages, in seconds, (ranks,)."""
        ends = np.zeros(self.ranks)
        np.maximum.at(ends, self.rank, self.end)
        return ends

    @property
    def busy_seconds(self) -> NDArray[np.float64]:
        """Seconds of each entry inside its two passes."""
        return self.forward - self.start + self.end - self.backward

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step, reduction included."""
        return float(self.work_end_seconds.max()) + self.step_end_seconds

    @property
    def compute_ratio(self) -> float:
        """Share of all devices' time spent on arithmetic, 0 to 1."""
        return float(self.compute.sum()) / self._all

    @property
    def exposed_ratio(self) -> float:
        """Share of all devices' time in a microbatch that waits for transfers, copies or its ring."""
        return float((self.busy_seconds - self.compute).sum()) / self._all

    @property
    def idle_ratio(self) -> float:
        """Share of all devices' time outside microbatches and step end: waits for others, pipeline bubbles."""
        step_ends = self.ranks * self.stages * self.step_end_seconds
        return max(0.0, 1.0 - (float(self.busy_seconds.sum()) + step_ends) / self._all)

    @property
    def most_held_tokens(self) -> float:
        """Largest number of tokens that any rank held at once."""
        return float(self.held_tokens.max(initial=0.0))

    @property
    def _all(self) -> float:
        return self.ranks * self.stages * self.step_seconds
