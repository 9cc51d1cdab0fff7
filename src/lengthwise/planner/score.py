"""What a plan costs: walk its one global order and keep a clock for every rank.

Independent of every planner: it reads the plan alone, so that all planners are judged by the same few lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The time of one step under given costs.

    makespan_seconds: when the last rank is done.
    busy_seconds: for each rank, the time it works (waiting left out).
    ring_tokens: tokens of sequences that are cut over more than one rank.
    num_tokens: all tokens of the step.
    """

    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    ring_tokens: int
    num_tokens: int

    @property
    def idle_ratio(self) -> float:
        """Share of the ranks' time that is spent waiting, 0 to 1."""
        mean = sum(self.busy_seconds) / len(self.busy_seconds)
        return max(0.0, 1.0 - mean / self.makespan_seconds) if self.makespan_seconds > 0 else 0.0

    @property
    def ring_token_ratio(self) -> float:
        """Share of tokens that are cut over more than one rank, 0 to 1."""
        return self.ring_tokens / self.num_tokens


def score(plan: Plan, cost: CostModel) -> Score:
    """Score a plan: a microbatch starts when all its ranks are free and keeps each busy for the sum of its pieces.

    In a plan of kind `waves` it starts when every rank of the cluster is free.

    Raises:
        PlanError: a feature whose time these costs do not tell (offload, recompute, heads, shares, pipeline).
    """
    free = np.zeros(plan.ranks)
    busy = np.zeros(plan.ranks)
    lock_step = plan.schedule["kind"] == "waves"
    _refuse_unpriced(plan)
    for microbatch in plan.microbatches:
        ranks, seconds = _busy_seconds(plan, microbatch, cost)
        start = free.max() if lock_step else free[ranks].max()
        free[ranks] = start + seconds
        busy[ranks] += seconds
    return Score(
        makespan_seconds=float(free.max()),
        busy_seconds=tuple(busy.tolist()),
        ring_tokens=plan.ring_tokens,
        num_tokens=sum(plan.tokens),
    )


def _busy_seconds(plan: Plan, microbatch: Microbatch, cost: CostModel) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ranks of a microbatch and how long it keeps each of them busy."""
    if len(microbatch.pieces) == 1:
        piece = microbatch.pieces[0]
        seconds = cost.fixed_seconds + cost.piece_seconds([plan.tokens[i] for i in piece.sequences], piece.degree)
        return np.array(piece.ranks, dtype=np.int64), np.full(piece.degree, seconds)
    total = dict.fromkeys(microbatch.ranks, cost.fixed_seconds)
    for piece in microbatch.pieces:
        seconds = cost.piece_seconds([plan.tokens[i] for i in piece.sequences], piece.degree)
        for rank in piece.ranks:
            total[rank] += seconds
    return np.array(list(total), dtype=np.int64), np.array(list(total.values()))


def _refuse_unpriced(plan: Plan) -> None:
    for number, microbatch in enumerate(plan.microbatches):
        unpriced = [
            name
            for name, used in (
                ("offload", microbatch.offload > 0),
                ("recompute", microbatch.recompute != "none"),
                ("heads", any(piece.heads > 1 for piece in microbatch.pieces)),
                ("shares", any(piece.shares is not None for piece in microbatch.pieces)),
                ("pipeline", plan.schedule["kind"] == "pipeline"),
            )
            if used
        ]
        if unpriced:
            raise PlanError(
                f"microbatch {number}",
                expected="a plan whose time these costs can tell",
                got=f"a plan with {', '.join(unpriced)}",
                remedy="Score plans without these features.",
            )
