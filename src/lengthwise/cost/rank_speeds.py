"""Which ranks compute slower than others: predicted over busy seconds. Pure.

The median of the steps counts. A constant error of the costs affects all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.plan import Plan
from lengthwise.cost.links import Floats
from lengthwise.cost.passes import parts_by_shares
from lengthwise.cost.terms import Cost
from lengthwise.cost.trees import folded

STEPS = 20  # the latest steps, which count
_LEAST_STEPS = 5  # needed to tell a slow rank from a slow moment
_UNEQUAL = 1.25  # the fastest over the slowest rank; below, errors of the costs may explain it
_GRID = 20  # speeds are rounded to twentieths, so that plans ignore small fluctuations


@dataclass(frozen=True, slots=True, kw_only=True)
class RanStep:
    """A finished step, and each rank's busy seconds, without waits."""

    plan: Plan
    busy_seconds: tuple[float, ...]


def rank_speeds(cost: Cost, steps: Sequence[RanStep]) -> tuple[float, ...] | None:
    """Return the speed of each rank in these steps, the fastest 1; None if all are alike, or steps too few."""
    latest = steps[-STEPS:]
    if len(latest) < _LEAST_STEPS:
        return None
    expected = np.array([_busy_seconds(step.plan, cost) for step in latest])
    busy = np.array([step.busy_seconds for step in latest])
    had_work = (expected > 0) & (busy > 0)
    if np.any(had_work.sum(axis=0) < _LEAST_STEPS):
        return None
    speeds = np.nanmedian(np.where(had_work, expected / np.where(had_work, busy, 1.0), np.nan), axis=0)
    speeds = speeds / speeds.max()
    if speeds.min() * _UNEQUAL > 1:
        return None
    return tuple(float(max(1, round(_GRID * speed)) / _GRID) for speed in speeds)


def _busy_seconds(plan: Plan, cost: Cost) -> Floats:
    """Return the arithmetic and overhead of each rank; unlike `score`, only its own share of a ring."""
    plan, cost = folded(plan, cost)
    busy = np.zeros(plan.ranks)
    for microbatch in plan.microbatches:
        passes = cost.passes(microbatch.recompute)
        attention, linear = (sum(getattr(each, name) for each in passes) for name in ("attention", "linear"))
        for piece in microbatch.pieces:
            lengths = [plan.tokens[i] for i in piece.sequences]
            tokens = np.array(lengths, dtype=np.float64)
            parts, held = 1 / piece.degree, tokens.sum() / piece.degree
            if piece.shares is not None:
                parts, held = parts_by_shares(lengths, piece.degree, piece.shares)
            held = held * cost.linear_ratio(tokens, piece.degree)
            seconds = float(cost.attention_seconds(tokens, piece.degree / piece.heads).sum())
            busy[list(piece.ranks)] += attention * seconds * parts + linear * cost.linear_seconds * held
        busy[list(microbatch.ranks)] += linear * cost.fixed_seconds
    return busy
