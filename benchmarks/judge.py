"""The judge of all planners: reads a plan file and four coefficients, and shares no code with Lengthwise.

Written from docs/plan-file.md and the cost formula alone, in plain Python, so that a mistake in the package's own
`score`, `check_plan` or `bound_seconds` would be seen: tests hold them against each other on random plans.

    seconds of a piece of d ranks = (q sum s^2 + l S) / d  +  max(0, c S (d - 1) / d - q sum s^2 / d)  if d > 1
    a microbatch adds g on each of its ranks, starts when all its ranks are free, and runs its pieces one after another

Where a plan notes `speeds`, q, l and g of a piece are divided by the speed of its slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """q, l, g and c of the formula, in seconds."""

    quadratic: float
    linear: float
    fixed: float = 0.0
    ring: float = 0.0


def judge(plan: dict[str, Any], cost: Coefficients) -> float:
    """Check a plan file and return its makespan in seconds.

    Raises:
        ValueError: a broken rule, named.
    """
    problem = next(broken_rules(plan), None)
    if problem is not None:
        raise ValueError(problem)
    lock_step = plan["schedule"]["kind"] == "waves"
    free = dict.fromkeys(range(plan["ranks"]), 0.0)
    speeds = [speed for count, speed in plan.get("speeds", [[plan["ranks"], 1.0]]) for _ in range(count)]
    for microbatch in plan["microbatches"]:
        busy: dict[int, float] = {}
        launches: dict[int, float] = {}
        for piece in pieces_of(microbatch):
            slowed = at_speed(cost, min(speeds[rank] for rank in piece["ranks"]))
            seconds = piece_seconds([plan["tokens"][i] for i in piece["sequences"]], len(piece["ranks"]), slowed)
            for rank in piece["ranks"]:
                busy[rank] = busy.get(rank, 0.0) + seconds
                launches[rank] = max(launches.get(rank, 0.0), slowed.fixed)
        busy = {rank: seconds + launches[rank] for rank, seconds in busy.items()}
        start = max(free.values()) if lock_step else max(free[rank] for rank in busy)
        free.update({rank: start + seconds for rank, seconds in busy.items()})
    return max(free.values())


def at_speed(cost: Coefficients, speed: float) -> Coefficients:
    """Divide what a rank of this speed does slower; transfers take what they take."""
    return Coefficients(
        quadratic=cost.quadratic / speed, linear=cost.linear / speed, fixed=cost.fixed / speed, ring=cost.ring
    )


def piece_seconds(lengths: Sequence[int], degree: int, cost: Coefficients) -> float:
    """Apply the formula to one piece, its microbatch's launch left out."""
    tokens = sum(lengths)
    attention = cost.quadratic * sum(length * length for length in lengths) / degree
    exposed = max(0.0, cost.ring * tokens * (degree - 1) / degree - attention)
    return attention + cost.linear * tokens / degree + exposed


def pieces_of(microbatch: dict[str, Any]) -> list[dict[str, Any]]:
    """List the pieces of a microbatch in either spelling."""
    return microbatch.get("pieces") or [microbatch]


def broken_rules(plan: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong: a sequence not there once, a rank that is none or twice in a piece, too many tokens."""
    seen = [0] * len(plan["tokens"])
    for number, microbatch in enumerate(plan["microbatches"]):
        where = f"microbatch {number}"
        if unpriced := {"offload", "recompute"} & microbatch.keys():
            yield f"{where}: {unpriced} has no price here"
        held: dict[int, float] = {}
        spared: dict[int, int] = {}
        for piece in pieces_of(microbatch):
            ranks, degree = piece["ranks"], len(piece["ranks"])
            if not ranks or not piece["sequences"]:
                yield f"{where}: an empty piece"
            if {"heads", "shares"} & piece.keys():
                yield f"{where}: heads and shares have no price here"
            if len(set(ranks)) < degree or not all(0 <= rank < plan["ranks"] for rank in ranks):
                yield f"{where}: ranks {ranks} of {plan['ranks']}"
            for sequence in piece["sequences"]:
                seen[sequence] += 1
                for rank, tokens in zip(ranks, chunk_tokens(plan["tokens"][sequence], degree), strict=True):
                    held[rank] = held.get(rank, 0) + tokens
                    spared[rank] = spared.get(rank, 0) + (degree > 1)
        for rank, tokens in held.items():
            if tokens > plan["capacity"] + spared[rank]:
                yield f"{where}: rank {rank} holds {tokens} tokens"
    for sequence, times in enumerate(seen):
        if times != 1:
            yield f"sequence {sequence} is there {times} times"


def chunk_tokens(length: int, degree: int) -> list[int]:
    """Cut a sequence into 2 d chunks; position j holds chunks j and 2 d - 1 - j."""
    if degree == 1:
        return [length]
    parts = 2 * degree
    borders = [length * k // parts for k in range(parts + 1)]
    return [borders[j + 1] - borders[j] + borders[parts - j] - borders[parts - 1 - j] for j in range(degree)]
