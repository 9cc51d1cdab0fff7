"""Costs that follow a run: the steps that it took correct the coefficients that it was planned with.

Every rank of every step is a row: seconds in which it did not wait, by squared tokens, tokens and microbatches that it
had. Least squares of the relative error, no coefficient below 0; what was known before counts as a tenth of a row a
coefficient, brought to the level of the rows first, so that what a run's steps cannot tell apart keeps its proportion.
A rank whose rows are longer than the costs say, in the median of the steps, is a slow one. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.plan import Microbatch, Plan
from lengthwise.cost.fit import least_squares
from lengthwise.cost.links import Floats
from lengthwise.cost.passes import parts_by_shares
from lengthwise.cost.terms import Cost

STEPS = 20  # the latest, that count
_NAMES = ("quadratic_seconds", "linear_seconds", "fixed_seconds")
_KNOWN_WEIGHT = 0.1  # of what was known before, where a row of a step has 1
_TURNS, _MOST_FALL = 3, 10.0
_LEAST_STEPS = 5  # that tell a slow rank from a slow moment
_UNEQUAL = 1.15  # the fastest over the slowest rank, from which on they are not taken for alike
_GRID = 20  # speeds are twentieths, so that plans do not follow every breath of a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RanStep:
    """A step that was run: busy_seconds of each rank, waiting left out, and step_seconds from start to end."""

    plan: Plan
    busy_seconds: tuple[float, ...]
    step_seconds: float


def refit(cost: Cost, steps: Sequence[RanStep], speeds: Sequence[float] | None = None) -> Cost:
    """Return the costs with coefficients of computing as these steps had them; the same costs where they tell none.

    `speeds`: of each rank, where they are known to differ; the costs are then those of speed 1.
    """
    rows = [_work(step.plan, cost) for step in steps[-STEPS:]]
    columns = np.concatenate(rows) if rows else np.zeros((0, len(_NAMES)))
    taken = [np.array(step.busy_seconds) * (1.0 if speeds is None else np.array(speeds)) for step in steps[-STEPS:]]
    seconds = np.concatenate(taken) if taken else np.zeros(0)
    had_work = (columns.sum(axis=1) > 0) & (seconds > 0)
    columns, seconds = columns[had_work], seconds[had_work]
    before = np.array([getattr(cost, name) for name in _NAMES])
    predicted = columns @ before
    if not len(seconds) or not np.all(predicted > 0):
        return cost
    level = before * float(np.exp(np.mean(np.log(seconds / predicted))))
    known = np.flatnonzero(level > 0)
    for _ in range(_TURNS):  # each from where the one before ended: far is reached, and noise does not carry there
        some = np.concatenate([columns[:, known], np.eye(len(known))])
        weights = np.concatenate([np.ones(len(seconds)), np.full(len(known), _KNOWN_WEIGHT)])
        solved = least_squares(some, np.concatenate([seconds, level[known]]), weights=weights)
        level[known] = np.maximum(solved.values, level[known] / _MOST_FALL)
    values = {_NAMES[column]: float(level[column]) for column in known}
    return replace(cost, **values) if any(values.values()) else cost


def rank_speeds(cost: Cost, steps: Sequence[RanStep]) -> tuple[float, ...] | None:
    """Return how fast each rank computed in these steps, the fastest 1; None where all are alike, or steps too few."""
    before = np.array([getattr(cost, name) for name in _NAMES])
    latest = steps[-STEPS:]
    if len(latest) < _LEAST_STEPS:
        return None
    said = np.array([_work(step.plan, cost) @ before for step in latest])
    busy = np.array([step.busy_seconds for step in latest])
    had_work = (said > 0) & (busy > 0)
    if np.any(had_work.sum(axis=0) < _LEAST_STEPS):
        return None
    speeds = np.nanmedian(np.where(had_work, said / np.where(had_work, busy, 1.0), np.nan), axis=0)
    speeds = speeds / speeds.max()
    if speeds.min() * _UNEQUAL > 1:
        return None
    return tuple(float(max(1, round(_GRID * speed)) / _GRID) for speed in speeds)


def _work(plan: Plan, cost: Cost) -> Floats:
    """Count what each rank of a plan does, [rank, (squared tokens, tokens, microbatches)]."""
    unit = replace(cost, quadratic_seconds=1.0)
    work = np.zeros((plan.ranks, len(_NAMES)))
    for microbatch in plan.microbatches:
        attention, linear = _repeats(microbatch, cost)
        for piece in microbatch.pieces:
            lengths = [plan.tokens[i] for i in piece.sequences]
            tokens = np.array(lengths, dtype=np.float64)
            pairs = float(unit.attention_seconds(tokens, piece.degree / piece.heads).sum())
            parts, held = 1 / piece.degree, tokens.sum() / piece.degree
            if piece.shares is not None:
                parts, held = parts_by_shares(lengths, piece.degree, piece.shares)
            ranks = list(piece.ranks)
            work[ranks, 0] += attention * pairs * parts
            work[ranks, 1] += linear * held
        work[list(microbatch.ranks), 2] += linear
    return work


def _repeats(microbatch: Microbatch, cost: Cost) -> tuple[float, float]:
    """Return how often a microbatch does its attention and its linear work, with what it computes again."""
    passes = cost.passes(microbatch.recompute)
    return sum(each.attention for each in passes), sum(each.linear for each in passes)
