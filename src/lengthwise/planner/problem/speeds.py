"""Ranks of unequal speed: a number for each rank, 1 if it computes as fast as the costs say.

Arithmetic and launches take seconds / v; links and copies do not change. Plans note speeds as runs of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from numbers import Real
from typing import Any

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError, raise_problems
from lengthwise.core.plan import Plan
from lengthwise.cost import Cost
from lengthwise.planner.problem.step_lengths import NAMED

_MOST_SPEED = 1e6  # the least speed is its inverse


def read_speeds(speeds: Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    """Return a speed for each of `ranks` ranks, or None if all are 1.

    Raises:
        ConfigError: a wrong number of speeds, or a speed outside 1e-6 to 1e6.
        Problems: several of these.
    """
    if speeds is None:
        return None
    listed = list(speeds)
    wrong = [rank for rank, value in enumerate(listed) if not _is_speed(value)]
    problems: list[LengthwiseError] = [
        refuse_speeds(
            f"speeds: rank {rank}", f"a number from {1 / _MOST_SPEED:g} to {_MOST_SPEED:g}", repr(listed[rank])
        )
        for rank in wrong[:NAMED]
    ]
    if len(wrong) > NAMED:
        problems.append(
            refuse_speeds("speeds", "such numbers for all ranks", f"{len(wrong) - NAMED} more invalid ones")
        )
    if len(listed) != ranks:
        problems.append(refuse_speeds("speeds", f"{ranks}, one per rank", str(len(listed))))
    raise_problems(problems)
    return None if all(value == 1 for value in listed) else tuple(float(value) for value in listed)


def speed_runs(speeds: Sequence[float]) -> list[list[float]]:
    """Return speeds as a plan's note: [number of neighbouring ranks, their speed], along the line."""
    return [[len(list(run)), speed] for speed, run in groupby(speeds)]


def at_mean_speed(cost: Cost, speeds: Sequence[float] | None) -> tuple[Cost, tuple[float, ...] | None]:
    """Return the costs of a rank of mean speed, and speeds relative to the mean, or None if all are equal."""
    if speeds is None:
        return cost, None
    if min(speeds) == max(speeds):
        return cost.at_speed(speeds[0]), None
    mean = math.fsum(speeds) / len(speeds)
    return cost.at_speed(mean), tuple(speed / mean for speed in speeds)


def noted_speeds(plan: Plan) -> tuple[float, ...] | None:
    """Return the speeds in a plan's notes, or None; PlanError: not a list of [count, speed] over all ranks."""
    runs = plan.notes.get("speeds")
    if runs is None:
        return None
    if not isinstance(runs, list) or not all(_is_run(run) for run in runs) or sum(run[0] for run in runs) != plan.ranks:
        expected = f"a list of [count, speed] for {plan.ranks} ranks in all"
        raise PlanError("speeds", expected=expected, got=repr(runs)[:80], remedy="Fix or leave out this note.")
    return read_speeds([speed for count, speed in runs for _ in range(count)], plan.ranks)


def _is_speed(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(1 / _MOST_SPEED <= value <= _MOST_SPEED)  # type: ignore[operator]


def _is_run(run: Any) -> bool:
    return isinstance(run, list) and len(run) == 2 and type(run[0]) is int and run[0] > 0 and _is_speed(run[1])


def refuse_speeds(where: str, expected: str, got: str) -> ConfigError:
    """Return the error for invalid speeds."""
    remedy = "Give every rank a speed: 1 is as fast as the costs say, 0.5 half as fast."
    return ConfigError(where, expected=expected, got=got, remedy=remedy)
