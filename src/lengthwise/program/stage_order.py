"""Interleaved 1F1B as data: one order of actions that holds for the stages of all pipelines.

With v virtual stages, stage s of p holds the chunks of layers s, s + p, .. s + (v - 1) p; a microbatch is 2 p v
actions. Stages run actions by tick, so nothing can deadlock (docs/decisions/stage-order.md; arXiv 2104.04473, 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.shape import LayerCut

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """The order of a step's actions: `ticks[i, j]` of action j of microbatch i, p v forward, then p v backward."""

    cut: LayerCut
    ticks: Whole

    @property
    def action_stages(self) -> Whole:
        """The stage of each of the 2 p v actions of a microbatch."""
        forward = np.arange(self.cut.chunks) % self.cut.stages
        return np.concatenate((forward, forward[::-1]))

    def together(self) -> list[tuple[Whole, Whole]]:
        """List (microbatches, actions) of each tick, ascending; no two of them share a stage of a rank."""
        flat = self.ticks.ravel()
        order = np.argsort(flat, kind="stable")
        borders = np.flatnonzero(np.diff(flat[order])) + 1
        actions = 2 * self.cut.chunks
        return [(part // actions, part % actions) for part in np.split(order, borders)]


def stage_order(ranks_of: Sequence[Sequence[int]], cut: LayerCut) -> StageOrder:
    """Order the actions of microbatches, given as the ranks of each in plan order.

    The slot k of a microbatch is one after the latest slot of its ranks; h = 1 for v = 1, else 2. Ticks:

        forward, stage s, its chunk c    2 n(c) + h s                                n(c) = (k // p) v p + c p + k % p
        backward                         2 n(v - 1 - c) + 2 (v - 1) p + 2 h (p - 1) + 1 - h s
    """
    slots, stages, virtual = _slots(ranks_of), cut.stages, cut.virtual
    stride, apart = cut.chunks, 1 if virtual == 1 else 2
    chunk, stage = np.divmod(np.arange(stride), stages)
    first = ((slots // stages) * stride + slots % stages)[:, None]
    forward = 2 * (first + chunk * stages) + apart * stage
    backward = 2 * (first + (virtual - 1 - chunk) * stages) + 2 * (virtual - 1) * stages + 1
    backward += apart * (2 * (stages - 1) - stage)
    return StageOrder(cut=cut, ticks=np.concatenate((forward, backward[:, ::-1]), axis=1))


def _slots(ranks_of: Sequence[Sequence[int]]) -> Whole:
    last: dict[int, int] = {}
    slots = np.empty(len(ranks_of), dtype=np.int64)
    for number, ranks in enumerate(ranks_of):
        slots[number] = slot = 1 + max(last.get(rank, -1) for rank in ranks)
        last.update(dict.fromkeys(ranks, slot))
    return slots
