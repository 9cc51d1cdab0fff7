"""What a plan costs: walk its one global order and keep a clock for every rank.

Independent of every planner: it reads the plan alone, so that all planners are judged by the same few lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import AllTermsCost, Cost, forward_share, recompute_cost
from lengthwise.planner.stage_clocks import stage_clocks


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


def score(plan: Plan, cost: Cost) -> Score:
    """Score a plan: a microbatch starts when all its ranks are free and keeps each busy for the sum of its pieces.

    In a plan of kind `waves` it starts when every rank of the cluster is free. Where a rank is a pipeline of p stages
    (of the costs, or of a plan of kind `pipeline`), these seconds are those of each stage, and all stages run
    interleaved 1F1B (`stage_order`, `stage_clocks`) with messages that take no time. For m microbatches of equal t on
    each rank that ends after t m + t (p - 1) / v; busy_seconds are those of one stage.

    Raises:
        PlanError: a feature whose time these costs do not tell: `CostModel` knows no offload, heads and shares,
            `AllTermsCost` only pipelines of its own stages.
    """
    stages = _priced_stages(plan, cost)
    lock_step = plan.schedule["kind"] == "waves"
    free, busy = [0.0] * plan.ranks, [0.0] * plan.ranks  # lists: single entries are read and written faster
    totals: list[dict[int, float]] = []
    for total in _rank_seconds(plan, cost):
        start = max(free) if lock_step else max(map(free.__getitem__, total))
        for rank, seconds in total.items():
            free[rank] = start + seconds
            busy[rank] += seconds
        if stages > 1:
            totals.append(dict.fromkeys(range(plan.ranks), 0.0) | total if lock_step else total)
    return Score(
        makespan_seconds=max(free) if stages == 1 else _pipelined_seconds(plan, totals, stages),
        busy_seconds=tuple(busy),
        ring_tokens=plan.ring_tokens,
        num_tokens=sum(plan.tokens),
    )


def _pipelined_seconds(plan: Plan, totals: Sequence[Mapping[int, float]], stages: int) -> float:
    """Run microbatches, given as seconds of each of their ranks, through stages; tell when the last one is done."""
    counts = [len(total) for total in totals]
    forward = np.repeat([forward_share(microbatch.recompute) for microbatch in plan.microbatches], counts)
    seconds = np.array([each for total in totals for each in total.values()])
    clocks = stage_clocks(
        [tuple(total) for total in totals],
        forward * seconds,
        (1 - forward) * seconds,
        stages=stages,
        virtual=int(plan.schedule.get("virtual", 1)),
    )
    return float(clocks.end.max())


def _rank_seconds(plan: Plan, cost: Cost) -> Iterator[dict[int, float]]:
    """Yield how long each microbatch keeps each of its ranks busy, its launch included."""
    costs = {kind: recompute_cost(cost, kind) for kind in {microbatch.recompute for microbatch in plan.microbatches}}
    took = _recomputed_seconds(plan, costs)
    for microbatch in plan.microbatches:
        fixed_seconds = costs[microbatch.recompute].fixed_seconds
        if len(microbatch.pieces) == 1:
            yield dict.fromkeys(microbatch.pieces[0].ranks, fixed_seconds + next(took))
            continue
        total = dict.fromkeys(microbatch.ranks, fixed_seconds)
        for piece in microbatch.pieces:
            seconds = next(took)
            for rank in piece.ranks:
                total[rank] += seconds
        yield total


def _recomputed_seconds(plan: Plan, costs: Mapping[str, Cost]) -> Iterator[float]:
    """Yield `_pieces_seconds`, of each microbatch by the costs of its kind of recomputation."""
    took = {kind: _pieces_seconds(plan, cost) for kind, cost in costs.items()}
    kinds = (microbatch.recompute for microbatch in plan.microbatches for _ in microbatch.pieces)
    return (took[kind][number] for number, kind in enumerate(kinds))


def _pieces_seconds(plan: Plan, cost: Cost) -> list[float]:
    """Tell how long each piece keeps each of its ranks busy, in the order of the plan; launches are left out.

    Local packs and rings of one sequence, thousands in a plan, are priced in two array operations, where their place
    and their microbatch make no difference.
    """
    placed = [(microbatch, piece) for microbatch in plan.microbatches for piece in microbatch.pieces]
    counts = np.array([len(piece.sequences) for _, piece in placed], dtype=np.int64)
    degrees = np.array([len(piece.ranks) for _, piece in placed], dtype=np.int64)
    tokens = np.array(plan.tokens, dtype=np.int64)
    inside = tokens[[i for _, piece in placed for i in piece.sequences]]
    starts = np.cumsum(counts) - counts
    took = np.zeros(len(placed))
    all_terms = isinstance(cost, AllTermsCost)
    plain = np.array([microbatch.offload == 0 and microbatch.recompute == "none" for microbatch, _ in placed])
    packed = (degrees == 1) & (counts > 0) & plain
    if np.any(packed):
        took[packed] = np.add.reduceat(cost.compute_seconds(inside), starts[counts > 0])[packed[counts > 0]]
    lone = (degrees > 1) & (counts == 1) & (not all_terms)
    took[lone] = cost.ring_piece_seconds(inside[starts[lone]], degrees[lone])
    for number in np.flatnonzero(~packed & ~lone & (counts > 0)).tolist():
        microbatch, piece = placed[number]
        lengths = [plan.tokens[i] for i in piece.sequences]
        if all_terms:
            took[number] = all_terms_seconds(lengths, microbatch, piece, cost)
        else:
            took[number] = cost.piece_seconds(lengths, piece.degree)
    return took.tolist()


def all_terms_seconds(lengths: list[int], microbatch: Microbatch, piece: Piece, cost: AllTermsCost) -> float:
    """Tell how long a piece keeps each of its ranks busy where the plan puts it, launches left out."""
    return cost.piece_seconds(
        lengths,
        piece.degree,
        ranks=piece.ranks,
        heads=piece.heads,
        offload=microbatch.offload,
        recompute=microbatch.recompute,
        shares=piece.shares,
    )


def _priced_stages(plan: Plan, cost: Cost) -> int:
    """Return the pipeline stages of a rank; refuse what these costs do not price."""
    asked = int(plan.schedule["stages"]) if plan.schedule["kind"] == "pipeline" else None
    if isinstance(cost, AllTermsCost):
        if asked not in (None, cost.stages):
            raise _unpriced("plan", [f"a pipeline of {asked} stages (the costs are those of {cost.stages})"])
        return cost.stages
    for number, microbatch in enumerate(plan.microbatches):
        pieces = microbatch.pieces
        used = ["offload"] * (microbatch.offload > 0)
        used += ["heads"] * any(piece.heads > 1 for piece in pieces)
        used += ["shares"] * any(piece.shares is not None for piece in pieces)
        if used:
            raise _unpriced(f"microbatch {number}", used)
    return asked or 1


def _unpriced(where: str, features: list[str]) -> PlanError:
    return PlanError(
        where,
        expected="a plan whose time these costs can tell",
        got=f"a plan with {', '.join(features)}",
        remedy="Score plans without these features, or with costs that hold them.",
    )
