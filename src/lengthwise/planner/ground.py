"""The line of ranks as rings find it: level, or quicker to run on in one place than in another.

A ring inside a node takes the near link, one that straddles a border the far one; degrees are chosen as if every ring
lay in as few nodes as can be, so where a narrow ring is put decides whether it keeps that promise. Those who place
rings ask here how much longer than promised each place takes, and end a ring as early as they can instead of starting
it so. Where all places are alike the answer is None, and nothing is computed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost import AllTermsCost, Cost


class Ground:
    """What the places of the line add to the seconds that `cost` tells of a ring, for a line of `ranks`."""

    def __init__(self, cost: Cost, ranks: int) -> None:
        self.ranks = ranks
        self._cost = cost
        self._across: Cost | None = None  # the same costs where every ring leaves its node
        self._ranks_per_node = ranks
        if isinstance(cost, AllTermsCost) and cost.near != cost.far and cost.ranks_per_node < ranks:
            self._across, self._ranks_per_node = replace(cost, ranks_per_node=1), cost.ranks_per_node
        self._penalties: dict[tuple[int, int], float] = {}
        self._straddling: dict[int, NDArray[np.float64]] = {}

    @property
    def is_level(self) -> bool:
        """Whether all places are alike for every ring."""
        return self._across is None

    def prepare(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> None:
        """Price many rings at once, before they are asked for one by one."""
        if self._across is None:
            return
        some = np.flatnonzero((degrees > 1) & (degrees <= self._ranks_per_node))
        lengths, degrees = lengths[some], degrees[some]
        seconds = (each.ring_piece_seconds(lengths, degrees) for each in (self._across, self._cost))
        penalties = np.subtract(*seconds).tolist()
        self._penalties.update(zip(zip(lengths.tolist(), degrees.tolist(), strict=True), penalties, strict=True))

    def extra_seconds(self, length: int, degree: int) -> NDArray[np.float64] | None:
        """Tell for each first rank how much longer than in its best place a ring takes; None where nowhere longer."""
        if self._across is None or not 1 < degree <= self._ranks_per_node:
            return None
        key = length, degree
        if key not in self._penalties:
            self.prepare(np.array([length]), np.array([degree]))
        penalty = self._penalties[key]
        return penalty * self._straddles(degree) if penalty > 0 else None

    def _straddles(self, degree: int) -> NDArray[np.float64]:
        """Return 1 for each first rank from which a ring of `degree` leaves its node, else 0."""
        if degree not in self._straddling:
            firsts = np.arange(self.ranks - degree + 1) % self._ranks_per_node
            self._straddling[degree] = (firsts + degree > self._ranks_per_node).astype(np.float64)
        return self._straddling[degree]
