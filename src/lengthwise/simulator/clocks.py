"""The timeline of one step, from a plan and its costs.

Each rank has a clock that follows the plan's order, as in `planner.score`; pieces run by ring steps (`rounds`), stages
by interleaved 1F1B (`program.stage_order`), and uplinks are shared (`contention`). Not simulated: variance of kernels,
congestion beyond the uplinks, activations and rings that share a link, the order of copies on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.core.timeline import Timeline
from lengthwise.cost import Cost, folded
from lengthwise.cost.links import Floats
from lengthwise.program.features import SIMULATOR, features_of
from lengthwise.program.stage_clocks import stage_clocks
from lengthwise.simulator.contention import TURNS, Uplinks
from lengthwise.simulator.rounds import MicrobatchClocks, microbatch_clocks, ring_clocks


def simulate_plan(plan: Plan, cost: Cost) -> Timeline:
    """Simulate one step of any planner's plan; `waves` run in lock-step. cost: costs, with a rank's number of stages.

    PlanError: the plan has another number of stages than `cost`, shares with split heads, unequal speeds, or features
    that `cost` does not price.
    """
    plan, cost = folded(plan, cost)
    if not features_of(plan) <= SIMULATOR:
        expected, got = "ranks of one speed, all that is simulated", "a plan for unequal ranks"
        remedy = "Score it instead (`lengthwise plan --speeds` prints that), or plan without {speeds}."
        raise PlanError("speeds", expected=expected, got=got, remedy=remedy)
    stages = cost.stages or plan.cut.stages
    if plan.schedule["kind"] == "pipeline" and plan.cut.stages != stages:
        got, remedy = str(plan.cut.stages), "Give costs of that many stages ({stages})."
        raise PlanError("schedule: stages", expected=f"{stages}, as in the costs", got=got, remedy=remedy)
    run = _run_flat if stages == 1 else partial(_run_stages, stages=stages)
    clocks = _all_clocks(plan, lambda _: cost)
    timeline = run(plan, cost, clocks)
    if not cost.shares_uplinks:
        return timeline
    uplinks = Uplinks(plan, [float(clock.total.max()) for clock in clocks], cost)
    for _ in range(TURNS):
        if not uplinks.slow_down(*timeline.microbatch_spans(len(plan.microbatches))):
            break
        timeline = run(plan, cost, _all_clocks(plan, uplinks.slowed))
    return timeline


def _run_flat(plan: Plan, cost: Cost, clocks: list[MicrobatchClocks]) -> Timeline:
    free = np.zeros(plan.ranks)
    starts = []
    for clock in clocks:
        where = np.array(clock.ranks)
        start = float(free.max() if plan.schedule["kind"] == "waves" else free[where].max())
        if cost.traffic is not None and plan.schedule["kind"] == "waves":  # gathers that nothing hides come first
            passes = (float(seconds.max()) for seconds in (clock.forward, clock.total - clock.forward))
            start += float(cost.traffic.wave_seconds(*passes)) - float(clock.total.max())
        starts.append(start)
        free[where] = starts[-1] + clock.total
    start = np.repeat(starts, [len(clock.ranks) for clock in clocks])
    forward = start + np.concatenate([clock.forward for clock in clocks])
    return Timeline(
        **_rows(clocks),
        ranks=plan.ranks,
        stages=1,
        stage=np.zeros(len(start), dtype=np.int64),
        start=start,
        forward=forward,
        backward=forward,
        end=start + np.concatenate([clock.total for clock in clocks]),
        step_end_seconds=cost.step_end_seconds(plan.ranks),
    )


def _run_stages(plan: Plan, cost: Cost, clocks: list[MicrobatchClocks], *, stages: int) -> Timeline:
    if plan.schedule["kind"] == "waves":
        clocks = [_with_all_ranks(clock, plan.ranks) for clock in clocks]
    cut = replace(plan.cut, stages=stages)
    rows = _rows(clocks)
    forward = np.concatenate([clock.forward for clock in clocks])
    ran = stage_clocks(
        [clock.ranks for clock in clocks],
        forward,
        np.concatenate([clock.total for clock in clocks]) - forward,
        cut,
        send_seconds=cost.stage_send_seconds(rows["held_tokens"]),
    )
    chunks = cut.chunks
    repeated: dict[str, Any] = {name: np.tile(values, chunks) for name, values in rows.items()}
    for name in ("compute", "copied"):
        repeated[name] /= cut.virtual
    return Timeline(
        **repeated,
        ranks=plan.ranks,
        stages=stages,
        stage=np.repeat(ran.stage[:chunks], len(forward)),
        start=ran.begin[:chunks].ravel(),
        forward=ran.end[:chunks].ravel(),
        backward=ran.begin[: chunks - 1 : -1].ravel(),
        end=ran.end[: chunks - 1 : -1].ravel(),
        step_end_seconds=cost.step_end_seconds(plan.ranks),
    )


def _rows(clocks: list[MicrobatchClocks]) -> dict[str, Any]:
    counts = [len(clock.ranks) for clock in clocks]
    return {
        "rank": np.array([rank for clock in clocks for rank in clock.ranks], dtype=np.int64),
        "microbatch": np.repeat(np.arange(len(clocks)), counts),
        "compute": np.concatenate([clock.compute for clock in clocks]),
        "copied": np.concatenate([clock.copied for clock in clocks]),
        "held_tokens": np.concatenate([clock.held_tokens for clock in clocks]),
    }


def _with_all_ranks(clocks: MicrobatchClocks, ranks: int) -> MicrobatchClocks:
    """Add the ranks without work to a wave, because they run its stages, too."""

    def spread(values: Floats) -> Floats:
        every = np.zeros(ranks)
        every[list(clocks.ranks)] = values
        return every

    names = ("forward", "total", "compute", "copied", "held_tokens")
    return MicrobatchClocks(ranks=tuple(range(ranks)), **{name: spread(getattr(clocks, name)) for name in names})


def _all_clocks(plan: Plan, cost_of: Callable[[int], Cost]) -> list[MicrobatchClocks]:
    """Run every microbatch from a common start, at its own costs.

    Pieces of a microbatch that share neither ranks nor uplinks run as if they were alone. Lone pieces of one shape are
    computed as one array; equal microbatches are computed once.
    """
    parts: list[tuple[int, Microbatch]] = []  # (number of a microbatch, pieces of it that run by themselves)
    first: dict[object, int] = {}
    same: list[int] = []  # per part, the first that is equal to it
    stacked: dict[object, list[int]] = {}
    for index, microbatch in enumerate(plan.microbatches):
        cost, pieces = cost_of(index), microbatch.pieces
        has_rings = any(piece.degree > 1 for piece in pieces)
        is_apart = sum(piece.degree for piece in pieces) == len(microbatch.ranks)
        are_lone = is_apart and not (cost.shares_uplinks and has_rings)
        for own in [replace(microbatch, pieces=(piece,)) for piece in pieces] if are_lone else [microbatch]:
            piece, number = own.pieces[0], len(parts)
            is_pack = are_lone and piece.degree == 1  # priced as quickly as compared
            key = number if is_pack else (_alike(own, plan.tokens, cost), cost.far.bytes_per_second)
            parts.append((index, own))
            same.append(first.setdefault(key, number))
            if are_lone and same[-1] == number:
                shape = piece.degree, piece.heads, microbatch.offload, microbatch.recompute
                stacked.setdefault(shape, []).append(number)
    known: dict[int, MicrobatchClocks] = {}
    for numbers in stacked.values():
        together = ring_clocks([parts[number][1] for number in numbers], plan.tokens, cost_of(parts[numbers[0]][0]))
        known.update(zip(numbers, together, strict=True))
    found: list[list[MicrobatchClocks]] = [[] for _ in plan.microbatches]
    for number, (index, own) in enumerate(parts):
        if same[number] == number and number not in known:
            known[number] = microbatch_clocks(own, plan.tokens, cost_of(index))
        found[index].append(replace(known[same[number]], ranks=own.ranks))
    return [_joined(each) for each in found]


def _joined(parts: list[MicrobatchClocks]) -> MicrobatchClocks:
    """Join pieces of a microbatch that ran apart, by ascending ranks."""
    if len(parts) == 1:
        return parts[0]
    ranks = [rank for part in parts for rank in part.ranks]
    order = np.argsort(ranks)
    names = ("forward", "total", "compute", "copied", "held_tokens")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
    return MicrobatchClocks(ranks=tuple(sorted(ranks)), **arrays)


def _alike(microbatch: Microbatch, tokens: Sequence[int], cost: Cost) -> object:
    """Return the values on which a microbatch's clocks depend: lengths, and places of ranks from its first node on."""
    base = min(microbatch.ranks) // cost.ranks_per_node * cost.ranks_per_node
    pieces = tuple(
        (tuple(rank - base for rank in p.ranks), tuple(tokens[i] for i in p.sequences), p.heads, p.shares)
        for p in microbatch.pieces
    )
    return pieces, microbatch.offload, microbatch.recompute
