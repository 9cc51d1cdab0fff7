"""Plans that no planner would make but every reader must run: any ranks in any order, packs beside rings, shares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.planner import CUTTING_PLANNERS, PACKED_DP, PLANNERS
from lengthwise.program.features import with_requires

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)


def make_plan(
    ranks: int, tokens: Sequence[int], microbatches: Sequence[Sequence[Piece] | Piece], *, layers: int = 1
) -> Plan:
    """Write a plan by hand: each microbatch is a piece or a list of pieces; capacity never binds."""
    rows = [(row,) if isinstance(row, Piece) else tuple(row) for row in microbatches]
    return Plan(
        ranks=ranks,
        layers=layers,
        capacity=sum(tokens) + len(tokens) + 1,
        tokens=tuple(tokens),
        microbatches=tuple(Microbatch(pieces=row) for row in rows),
        requires=tuple(
            name
            for name, uses in (("heads", lambda piece: piece.heads > 1), ("shares", lambda piece: piece.shares))
            if any(uses(piece) for row in rows for piece in row)
        ),
    )


def draw_lengths(choose: random.Random, ranks: int, count: int) -> list[int]:
    """Draw the lengths that break things: 1, 2, fewer than ranks, primes, 2d - 1, 2d + 1, and some longer ones."""
    kinds = (1, 2, max(1, ranks - 1), 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, choose.choice(PRIMES))
    return [choose.choice((*kinds, choose.randint(1, 40))) for _ in range(count)]


def clip_for(planner: str, tokens: Sequence[int], capacity_tokens: int) -> list[int]:
    """Return lengths that a planner takes: `packed-dp` refuses those that one rank does not hold."""
    return [min(length, capacity_tokens) if planner == PACKED_DP else length for length in tokens]


def planners_of(tokens: Sequence[int], cluster: Cluster) -> tuple[str, ...]:
    """List the planners that plan these lengths without offload."""
    return PLANNERS if max(tokens) <= cluster.capacity_tokens else CUTTING_PLANNERS


def in_turn(plan: Plan, **choices: Sequence[str] | Sequence[float]) -> Plan:
    """Give a plan's microbatches these choices in turn: kinds of `recompute`, ratios of `offload`."""
    chosen = (
        replace(each, **{name: values[number % len(values)] for name, values in choices.items()})
        for number, each in enumerate(plan.microbatches)
    )
    return replace(plan, microbatches=tuple(chosen))


def random_plan(
    choose: random.Random,
    ranks: int,
    tokens: Sequence[int],
    *,
    layers: int = 1,
    shares: bool = True,
    num_heads: int = 1,
) -> Plan:
    """Put every sequence somewhere: rings over any ranks in any order, up to three pieces a microbatch, any shares.

    Of a model with `num_heads` heads rings split any number that divides them.
    """
    left = list(range(len(tokens)))
    choose.shuffle(left)
    pieces = []
    while left:
        taken = [left.pop() for _ in range(min(len(left), choose.choice((1, 1, 2, 3))))]
        degree = choose.randint(1, ranks)
        pieces.append(
            Piece(
                ranks=tuple(choose.sample(range(ranks), degree)),
                sequences=tuple(taken),
                shares=_random_shares(choose, degree) if shares else None,
                heads=choose.choice([u for u in range(1, degree + 1) if degree % u == num_heads % u == 0])
                if num_heads > 1
                else 1,
            )
        )
    microbatches = []
    while pieces:
        microbatches.append([pieces.pop() for _ in range(min(len(pieces), choose.choice((1, 1, 2, 3))))])
    return make_plan(ranks, tokens, microbatches, layers=layers)


def with_branches(choose: random.Random, plan: Plan) -> Plan:
    """Let some sequences of a plan continue others of their piece, which may continue others."""
    parents: list[int | None] = [None] * len(plan.tokens)
    for microbatch in plan.microbatches:
        for piece in microbatch.pieces:
            path: list[int] = []
            for sequence in piece.sequences:
                del path[choose.randint(0, len(path)) :]
                parents[sequence] = path[-1] if path else None
                path.append(sequence)
    return with_requires(replace(plan, parents=tuple(parents)))


def line_to(plan: Plan, sequence: int) -> list[int]:
    """Return the sequences that a sequence continues, in the order of the text, and then itself."""
    parent = plan.parents[sequence] if plan.parents else None
    return [sequence] if parent is None else [*line_to(plan, parent), sequence]


def _random_shares(choose: random.Random, degree: int) -> tuple[float, ...] | None:
    if choose.random() < 0.6:
        return None
    shares = [choose.choice((0, 0.1, 1, 1, 2.5, 7)) for _ in range(degree)]
    return tuple(shares) if any(shares) else None
