"""The rules between the numbers of a plan, for any planner and any outside tool; `Plan.from_json` checks types.

Each sequence stands in exactly one piece, ranks exist, and no rank holds too many tokens. All problems are reported at
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lengthwise.core.errors import LengthwiseError, PlanError, raise_problems
from lengthwise.core.held import held_by_rank, kept_ratio
from lengthwise.core.plan import Microbatch, Piece, Plan, kinds_by_layer
from lengthwise.program.features import REQUIRED, Feature, features_of

_REPORTED = 20  # problems reported in full; a broken plan can have thousands
_REMEDY = "Correct the plan or the planner that wrote it."


def check_plan(plan: Plan) -> None:
    """Check every rule of the plan file that `Plan.from_json` has not checked.

    Raises:
        PlanError: one rule is broken; names microbatch, piece, rank or sequence.
        Problems: several rules are broken.
    """
    problems: list[LengthwiseError] = list(_header_problems(plan))
    for number, microbatch in enumerate(plan.microbatches):
        where = f"microbatch {number}"
        broken = [
            problem
            for place, piece in enumerate(microbatch.pieces)
            for problem in _piece_problems(plan, piece, f"{where}, piece {place}")
        ]
        if not microbatch.pieces:
            broken.append(_problem(where, "at least one piece", "none"))
        problems += broken or _capacity_problems(plan, microbatch, where)
        problems += _mix_problems(plan, microbatch, f"{where}: recompute")
    problems += _count_problems(plan)
    rest = len(problems) - _REPORTED
    if rest > 0:
        problems = [*problems[:_REPORTED], _problem("plan", "no broken rules", f"{rest} more problems")]
    raise_problems(problems)


def _problem(where: str, expected: str, got: object) -> PlanError:
    return PlanError(where, expected=expected, got=str(got), remedy=_REMEDY)


def _header_problems(plan: Plan) -> Iterator[PlanError]:
    for i, length in enumerate(plan.tokens):
        if length < 1:
            yield _problem(f"tokens[{i}]", "a length of at least 1", length)
    if len(plan.parents) not in (0, len(plan.tokens)):
        yield _problem("parents", f"one for each of the {len(plan.tokens)} sequences", len(plan.parents))
    for feature in sorted(features_of(plan) & REQUIRED - set(plan.requires)):
        yield _problem("requires", f'"{feature}" listed, since the plan uses it', list(plan.requires))
    if plan.schedule.get("kind") == Feature.PIPELINE:
        for key in ("stages", "virtual"):
            value = plan.schedule.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield _problem(f"schedule: {key}", "a whole number of at least 1", value)


def _piece_problems(plan: Plan, piece: Piece, where: str) -> Iterator[PlanError]:
    if not piece.ranks:
        yield _problem(where, "at least one rank", "none")
    if not piece.sequences:
        yield _problem(where, "at least one sequence", "none")
    for rank, times in Counter(piece.ranks).items():
        if not 0 <= rank < plan.ranks:
            yield _problem(where, f"ranks from 0 to {plan.ranks - 1}", f"rank {rank}")
        if times > 1:
            yield _problem(where, "each rank once in a piece", f"rank {rank} {times} times")
    for sequence in piece.sequences:
        if not 0 <= sequence < len(plan.tokens):
            yield _problem(where, f"sequences from 0 to {len(plan.tokens) - 1}", f"sequence {sequence}")
    if len(plan.parents) == len(plan.tokens):
        yield from _branch_problems(plan.parents, piece, where)
    if piece.heads < 1 or piece.degree % piece.heads:
        yield _problem(where, f"heads that divide the {piece.degree} ranks", f"heads {piece.heads}")
    if piece.shares is not None:
        if len(piece.shares) != piece.degree:
            yield _problem(where, f"{piece.degree} shares, one per rank", f"{len(piece.shares)} shares")
        if not all(share >= 0 for share in piece.shares) or not 0 < sum(piece.shares) < float("inf"):
            yield _problem(where, "shares of 0 or more with a finite sum above 0", list(piece.shares))


def _branch_problems(parents: Sequence[int | None], piece: Piece, where: str) -> Iterator[PlanError]:
    """Check that a piece lists each sequence after the one that it continues, depth first."""
    path: list[int] = []  # the last sequence, after those that it continues
    for sequence in piece.sequences:
        parent = parents[sequence] if 0 <= sequence < len(parents) else None
        while path and path[-1] != parent:
            path.pop()
        if parent is not None and not path:
            expected = (
                f"sequence {sequence} in the piece of sequence {parent}, which it continues, depth first after it"
            )
            yield _problem(where, expected, list(piece.sequences))
        path.append(sequence)


def _capacity_problems(plan: Plan, microbatch: Microbatch, where: str) -> list[PlanError]:
    """Check, per rank: tokens held x share kept on the device <= capacity + tokens allowed for rounding."""
    held, rounding = held_by_rank(plan, microbatch)
    kept = kept_ratio(microbatch.offload, plan.layers)
    return [
        _problem(
            f"{where}, rank {rank}",
            f"at most {plan.capacity} tokens held (+ {rounding[rank]} for rounding)",
            f"{tokens} tokens" if kept == 1 else f"{tokens} tokens at offload {microbatch.offload}",
        )
        for rank, tokens in held.items()
        if tokens * kept > (plan.capacity + rounding[rank]) * (1 + 1e-12)
    ]


def _mix_problems(plan: Plan, microbatch: Microbatch, where: str) -> Iterator[PlanError]:
    """Check a recomputation whose first layers have a stronger kind."""
    mix = kinds_by_layer(microbatch.recompute)
    if not mix.number:
        return
    if mix.layers != plan.layers:
        yield _problem(where, f"a number of the plan's {plan.layers} layers", microbatch.recompute)
    if microbatch.offload:
        yield _problem(where, f"one kind beside offload {microbatch.offload}", microbatch.recompute)
    if plan.schedule.get("kind") == Feature.PIPELINE:  # a stage has some of the layers
        yield _problem(where, "one kind in a pipeline", microbatch.recompute)


def _count_problems(plan: Plan) -> Iterator[PlanError]:
    places = Counter(i for m in plan.microbatches for piece in m.pieces for i in piece.sequences)
    for i, length in enumerate(plan.tokens):
        if places[i] != 1:
            yield _problem(f"sequence {i} of {length} tokens", "in exactly one piece", f"in {places[i]} places")
