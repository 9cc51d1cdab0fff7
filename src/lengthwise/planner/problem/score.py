"""The time of a plan: walk its one global order with a clock for every rank.

It reads only the plan, so it compares all planners alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import LayerCut
from lengthwise.cost import Choice, Cost, folded
from lengthwise.planner.problem.speeds import noted_speeds, read_speeds
from lengthwise.program.stage_clocks import stage_clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The time of one step under given costs.

    makespan_seconds: seconds until the last rank is done.
    busy_seconds: seconds of each rank's work, without waits.
    ring_tokens: tokens of sequences that are cut over more than one rank.
    num_tokens: all tokens of the step.
    """

    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    ring_tokens: int
    num_tokens: int

    @property
    def idle_ratio(self) -> float:
        """Share of the ranks' time spent waiting, 0 to 1."""
        mean = sum(self.busy_seconds) / len(self.busy_seconds)
        return max(0.0, 1.0 - mean / self.makespan_seconds) if self.makespan_seconds > 0 else 0.0

    @property
    def ring_token_ratio(self) -> float:
        """Share of tokens in sequences that are cut over more than one rank, 0 to 1."""
        return self.ring_tokens / self.num_tokens


def score(plan: Plan, cost: Cost, *, speeds: Sequence[float] | None = None) -> Score:
    """Score a plan: a microbatch starts when all its ranks are free, and keeps each busy for the sum of its pieces.

    In a plan of kind `waves` it starts when every rank is free, and includes its gathers. If a rank is a pipeline of p
    stages, all seconds are those of a stage, and stages run interleaved 1F1B (`stage_order`, `stage_clocks`) with free
    messages: m microbatches of t each end after t m + t (p - 1) / v.

    Args:
        plan: a plan of any planner.
        cost: the costs of work.
        speeds: relative speed of each rank (default: the plan's notes, else 1); a piece is as slow as its slowest rank.

    Raises:
        PlanError: a feature that these costs do not price.
        ConfigError: invalid speeds.
    """
    asked, (plan, cost) = plan, folded(plan, cost)
    speeds = noted_speeds(plan) if speeds is None else read_speeds(speeds, plan.ranks)
    cut = replace(plan.cut, stages=_priced_stages(plan, cost))
    lock_step = plan.schedule["kind"] == "waves"
    free, busy = [0.0] * plan.ranks, [0.0] * plan.ranks  # lists, since single entries are faster than in arrays
    totals: list[dict[int, float]] = []
    for microbatch, total in zip(plan.microbatches, _rank_seconds(plan, cost, speeds), strict=True):
        start = max(free) if lock_step else max(map(free.__getitem__, total))
        if lock_step and cost.traffic is not None:
            slowest = max(total.values())
            start += float(cost.wave_seconds(slowest, _recompute(microbatch, cost))) - slowest
        for rank, seconds in total.items():
            free[rank] = start + seconds
            busy[rank] += seconds
        if cut.stages > 1:
            totals.append(dict.fromkeys(range(plan.ranks), 0.0) | total if lock_step else total)
    return Score(
        makespan_seconds=max(free) if cut.stages == 1 else _pipelined_seconds(plan, totals, cut, cost),
        busy_seconds=tuple(busy),
        ring_tokens=asked.ring_tokens,
        num_tokens=sum(asked.tokens),
    )


def _pipelined_seconds(plan: Plan, totals: Sequence[Mapping[int, float]], cut: LayerCut, cost: Cost) -> float:
    """Run microbatches, as seconds of each of their ranks, through the stages; return the end of the last."""
    counts = [len(total) for total in totals]
    forward = np.repeat([cost.forward_share(_recompute(microbatch, cost)) for microbatch in plan.microbatches], counts)
    seconds = np.array([each for total in totals for each in total.values()])
    clocks = stage_clocks([tuple(total) for total in totals], forward * seconds, (1 - forward) * seconds, cut)
    return float(clocks.end.max())


def _rank_seconds(plan: Plan, cost: Cost, speeds: Sequence[float] | None) -> Iterator[dict[int, float]]:
    """Yield the seconds that each microbatch keeps each of its ranks busy, with overhead."""
    costs = {kind: cost.recomputing(kind) for kind in {microbatch.recompute for microbatch in plan.microbatches}}
    pricing = dict.fromkeys(costs, cost) if _reads_choices(cost) else costs  # the former get each microbatch's kind
    placed = [(microbatch, piece) for microbatch in plan.microbatches for piece in microbatch.pieces]
    priced = {kind: _seconds_at(placed, plan.tokens, each, speeds) for kind, each in pricing.items()}
    took = (priced[microbatch.recompute][number] for number, (microbatch, _) in enumerate(placed))
    for microbatch in plan.microbatches:
        fixed_seconds = costs[microbatch.recompute].fixed_seconds
        if len(microbatch.pieces) == 1:
            ranks = microbatch.pieces[0].ranks
            launch = fixed_seconds if speeds is None else fixed_seconds / min(map(speeds.__getitem__, ranks))
            yield dict.fromkeys(ranks, launch + next(took))
            continue
        total = dict.fromkeys(microbatch.ranks, fixed_seconds if speeds is None else 0.0)
        if speeds is not None:
            for piece in microbatch.pieces:
                launch = fixed_seconds / min(map(speeds.__getitem__, piece.ranks))
                total.update({rank: max(total[rank], launch) for rank in piece.ranks})
        for piece in microbatch.pieces:
            seconds = next(took)
            for rank in piece.ranks:
                total[rank] += seconds
        yield total


def _seconds_at(
    placed: Sequence[tuple[Microbatch, Piece]], tokens: Sequence[int], cost: Cost, speeds: Sequence[float] | None
) -> list[float]:
    """Price pieces at relative rank speeds: even splits at the slowest rank's, shares by rank."""
    lengths_of = np.array(tokens, dtype=np.int64)
    if speeds is None:
        return _pieces_seconds(placed, lengths_of, cost)
    took = [0.0] * len(placed)
    alike: dict[float, list[int]] = {}
    for number, (microbatch, piece) in enumerate(placed):
        own = [speeds[rank] for rank in piece.ranks]
        if piece.shares is not None:
            lengths, choice = [tokens[i] for i in piece.sequences], _choice(microbatch, piece, cost)
            where = {"ranks": piece.ranks, "shares": piece.shares, "speeds": own}
            took[number] = cost.piece_seconds(lengths, piece.degree, choice, **where)
        else:
            alike.setdefault(min(own), []).append(number)
    for speed, numbers in alike.items():
        some = _pieces_seconds([placed[number] for number in numbers], lengths_of, cost.at_speed(speed))
        for number, seconds in zip(numbers, some, strict=True):
            took[number] = seconds
    return took


def _pieces_seconds(placed: Sequence[tuple[Microbatch, Piece]], tokens: NDArray[np.int64], cost: Cost) -> list[float]:
    """Return the seconds that each piece keeps its ranks busy, without overhead. tokens: all lengths of the step."""
    counts = np.array([len(piece.sequences) for _, piece in placed], dtype=np.int64)
    degrees = np.array([len(piece.ranks) for _, piece in placed], dtype=np.int64)
    inside = tokens[[i for _, piece in placed for i in piece.sequences]]
    starts = np.cumsum(counts) - counts
    took = np.zeros(len(placed))
    as_written = _reads_choices(cost)
    plain = np.array([microbatch.offload == 0 and microbatch.recompute == "none" for microbatch, _ in placed])
    is_ring = (degrees > 1) | (cost.choices.offloads & (counts == 1))  # one sequence on one rank may pay for copies
    packed = ~is_ring & (counts > 0) & plain
    if np.any(packed):
        took[packed] = np.add.reduceat(cost.compute_seconds(inside), starts[counts > 0])[packed[counts > 0]]
    lone = is_ring & (counts == 1) & (not as_written)
    took[lone] = cost.ring_piece_seconds(inside[starts[lone]], degrees[lone])
    rest = np.flatnonzero(~packed & ~lone & (counts > 0)).tolist()
    if as_written:
        took[rest] = written_seconds([(placed[n][1], _choice(*placed[n], cost)) for n in rest], tokens, cost)
    else:
        pieces = (placed[number][1] for number in rest)
        took[rest] = [cost.piece_seconds(tokens[list(piece.sequences)], piece.degree) for piece in pieces]
    return took.tolist()


def written_seconds(
    pieces: Sequence[tuple[Piece, Choice]], tokens: NDArray[np.int64], cost: Cost
) -> NDArray[np.float64]:
    """Price pieces as a plan states them, all without shares at once. tokens: all lengths of the step."""
    took = np.zeros(len(pieces))
    alike: dict[tuple[str, bool], list[int]] = {}
    for number, (piece, choice) in enumerate(pieces):
        if piece.shares is None and piece.degree % choice.heads == cost.heads % choice.heads == 0:
            alike.setdefault((choice.recompute, piece.degree > choice.heads), []).append(number)
        else:
            own, where = tokens[list(piece.sequences)], {"ranks": piece.ranks, "shares": piece.shares}
            took[number] = cost.piece_seconds(own, piece.degree, choice, **where)
    for (recompute, _), numbers in alike.items():
        some, choices = zip(*(pieces[number] for number in numbers), strict=True)
        heads, offload = (np.array([getattr(each, name) for each in choices]) for name in ("heads", "offload"))
        lengths, ranks = [tokens[list(piece.sequences)] for piece in some], [piece.ranks for piece in some]
        choice = Choice(heads=heads, offload=offload, recompute=recompute)
        took[numbers] = cost.pieces_seconds(lengths, ranks, choice)
    return took


def _reads_choices(cost: Cost) -> bool:
    """Return whether heads, offload and shares are priced as the plan states them."""
    return not cost.chooses_by_degree


def _recompute(microbatch: Microbatch, cost: Cost) -> str:
    """Return the kind to price: the costs', as long as a draft does not state it."""
    return cost.choices.recompute if microbatch.recompute == "none" else microbatch.recompute


def _choice(microbatch: Microbatch, piece: Piece, cost: Cost) -> Choice:
    return Choice(heads=piece.heads, offload=microbatch.offload, recompute=_recompute(microbatch, cost))


def _priced_stages(plan: Plan, cost: Cost) -> int:
    """Return the pipeline stages of a rank; refuse a number that these costs do not price."""
    asked = plan.cut.stages
    if plan.schedule["kind"] == "pipeline" and cost.stages not in (0, asked):
        expected, remedy = f"{cost.stages}, as in the costs", "Use costs of that many stages."
        raise PlanError("plan: stages", expected=expected, got=str(asked), remedy=remedy)
    return cost.stages or asked
