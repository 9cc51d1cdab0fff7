"""A plan and its costs -> the timeline of one step.

The plan's global order is walked with a clock a rank, as `planner.score` does; how long a ring keeps each of its ranks
comes from its stages (`rounds`), not from a formula. A microbatch starts when all its ranks are free. Packs on one rank
exchange nothing and are priced in one array operation for all of them. After its last microbatch every rank enters the
step's end, which all leave together. Not simulated: variance of kernels, congestion inside the network between nodes,
and the order of copies on the host beyond its share for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.cost import AllTermsCost
from lengthwise.simulator.rounds import MicrobatchClocks, microbatch_clocks
from lengthwise.simulator.stages import Floats
from lengthwise.simulator.timeline import Timeline


def simulate_plan(plan: Plan, cost: AllTermsCost, *, loader_seconds: float = 0.0) -> Timeline:
    """Simulate one step of `plan`.

    Args:
        plan: of any planner; `waves` are run in lock-step.
        cost: of the model and hardware; ranks of several stages fill and drain once a step.
        loader_seconds: what every rank waits for its data before the first microbatch.

    Raises:
        PlanError: a pipeline of other stages than the costs', or shares together with split heads.
    """
    kind, stages = plan.schedule["kind"], cost.stages
    if kind == "pipeline" and plan.schedule["stages"] != stages:
        raise PlanError(
            "schedule: stages",
            expected=f"{stages}, as in the costs",
            got=str(plan.schedule["stages"]),
            remedy="Give costs of that many stages (--pp).",
        )
    free, longest = np.full(plan.ranks, loader_seconds), np.zeros(plan.ranks)
    rows: list[tuple[int, float, MicrobatchClocks]] = []
    for index, clocks in enumerate(_all_clocks(plan, cost)):
        where = np.array(clocks.ranks)
        start = float(free.max() if kind == "waves" else free[where].max())
        free[where] = start + clocks.total
        longest[where] = np.maximum(longest[where], clocks.total)
        rows.append((index, start, clocks))
    counts = [len(clocks.ranks) for _, _, clocks in rows]
    starts = np.repeat([start for _, start, _ in rows], counts)
    return Timeline(
        ranks=plan.ranks,
        rank=np.array([rank for _, _, clocks in rows for rank in clocks.ranks], dtype=np.int64),
        microbatch=np.repeat(np.array([index for index, _, _ in rows], dtype=np.int64), counts),
        start=starts,
        forward=starts + np.concatenate([clocks.forward for _, _, clocks in rows]),
        end=starts + np.concatenate([clocks.total for _, _, clocks in rows]),
        compute=np.concatenate([clocks.compute for _, _, clocks in rows]),
        copied=np.concatenate([clocks.copied for _, _, clocks in rows]),
        held_tokens=np.concatenate([clocks.held_tokens for _, _, clocks in rows]),
        fill_seconds=longest * (stages - 1) / int(plan.schedule.get("virtual", 1)),
        step_end_seconds=cost.step_end_seconds(plan.ranks),
        loader_seconds=loader_seconds,
    )


def _all_clocks(plan: Plan, cost: AllTermsCost) -> list[MicrobatchClocks]:
    """Run every microbatch from a common start; equal ones only once."""
    alone = _lone_packs(plan, cost)
    known: dict[object, MicrobatchClocks] = {}
    clocks = []
    for index, microbatch in enumerate(plan.microbatches):
        if index in alone:
            clocks.append(alone[index])
            continue
        key = _alike(microbatch, plan.tokens, cost)
        if key not in known:
            known[key] = microbatch_clocks(microbatch, plan.tokens, cost)
        clocks.append(replace(known[key], ranks=microbatch.ranks))
    return clocks


def _alike(microbatch: Microbatch, tokens: Sequence[int], cost: AllTermsCost) -> object:
    """Name what a microbatch's clocks depend on: lengths, and where its ranks are, counted from the first's node."""
    base = min(microbatch.ranks) // cost.ranks_per_node * cost.ranks_per_node
    pieces = tuple(
        (tuple(rank - base for rank in p.ranks), tuple(tokens[i] for i in p.sequences), p.heads, p.shares)
        for p in microbatch.pieces
    )
    return pieces, microbatch.offload, microbatch.recompute


def _lone_packs(plan: Plan, cost: AllTermsCost) -> dict[int, MicrobatchClocks]:
    """Price the microbatches of one rank and no offload or recomputation, all in a few array operations."""
    chosen = [
        index
        for index, m in enumerate(plan.microbatches)
        if len(m.pieces) == 1 and m.pieces[0].degree == 1 and m.offload == 0 and m.recompute == "none"
    ]
    if not chosen:
        return {}
    packs = [plan.microbatches[index].pieces[0] for index in chosen]
    lengths = np.array([plan.tokens[i] for pack in packs for i in pack.sequences], dtype=np.float64)
    starts = np.cumsum([0, *(len(pack.sequences) for pack in packs)])[:-1]
    attention = np.add.reduceat(cost.attention_seconds(lengths, 1), starts)
    tokens = np.add.reduceat(lengths, starts)
    passes = cost.passes("none")
    linear = cost.work.linear_seconds * tokens + cost.fixed_seconds
    ends = np.cumsum([each.attention * attention + each.linear * linear for each in passes], axis=0)
    nothing: Floats = np.zeros(1)
    return {
        index: MicrobatchClocks(
            ranks=packs[number].ranks,
            forward=ends[0, number : number + 1],
            total=ends[-1, number : number + 1],
            compute=ends[-1, number : number + 1],
            copied=nothing,
            held_tokens=tokens[number : number + 1],
        )
        for number, index in enumerate(chosen)
    }
