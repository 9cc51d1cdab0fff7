"""What a plan can ask beyond rings and packs, what of it the simulator prices, and what the engine refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from lengthwise.core.errors import LengthwiseError, PlanError, raise_problems
from lengthwise.core.plan import KNOWN_FEATURES, Plan
from lengthwise.core.shape import UNCUT, LayerCut


class Feature(StrEnum):
    """A feature of plans; the value is its name in the plan file."""

    BRANCHES = "branches"
    HEADS = "heads"
    OFFLOAD = "offload"
    PIPELINE = "pipeline"
    RECOMPUTE = "recompute"
    SHARES = "shares"
    SPEEDS = "speeds"
    WAVES = "waves"


REQUIRED = frozenset(map(Feature, KNOWN_FEATURES))  # `requires` of a plan that uses one must name it
SIMULATOR = frozenset(Feature) - {Feature.SPEEDS}

_REPORTED = 10  # refusals in one message


def features_of(plan: Plan) -> frozenset[Feature]:
    """Return the features that a plan uses."""
    return frozenset(_features_of(plan))


def with_requires(plan: Plan) -> Plan:
    """Return the plan with the `requires` that its features need, the mode first."""
    return replace(plan, requires=tuple(sorted(features_of(plan) & REQUIRED, reverse=True)))


def _features_of(plan: Plan) -> Iterator[Feature]:
    kind = plan.schedule.get("kind")
    if kind != "free":
        yield Feature(kind)
    if plan.parents:
        yield Feature.BRANCHES
    runs = plan.notes.get("speeds")
    if runs is not None and not (isinstance(runs, list) and all(run[1:] == [1] for run in runs)):
        yield Feature.SPEEDS
    for microbatch in plan.microbatches:
        if microbatch.offload:
            yield Feature.OFFLOAD
        if microbatch.recompute != "none":
            yield Feature.RECOMPUTE
        if any(piece.heads != 1 for piece in microbatch.pieces):
            yield Feature.HEADS
        if any(piece.shares is not None for piece in microbatch.pieces):
            yield Feature.SHARES


def refuse_unsupported(plan: Plan, *, num_heads: int | None = None, cut: LayerCut = UNCUT) -> None:
    """Raise PlanError, or Problems, for anything in a plan that the engine cannot run.

    num_heads: number of the model's attention heads, which a split must divide. cut: the run's pipeline stages.
    """
    problems: list[LengthwiseError] = []
    problems += list(_impossible_splits(plan, num_heads or 0))[:_REPORTED]
    is_pipeline = plan.schedule.get("kind") == Feature.PIPELINE
    if plan.cut != cut or is_pipeline != (cut.stages > 1):
        expected = "kind free or waves, for a run without `stages`"
        if cut.stages > 1:
            expected = f"kind pipeline with stages {cut.stages} and virtual {cut.virtual}, as in the run"
        got = ", ".join(f"{key} {value}" for key, value in plan.schedule.items())
        remedy = "Plan again for these stages."
        problems.append(PlanError("plan: schedule", expected=expected, got=got, remedy=remedy))
    raise_problems(problems)


def _impossible_splits(plan: Plan, num_heads: int) -> Iterator[PlanError]:
    for number, microbatch in enumerate(plan.microbatches):
        for splits in sorted({piece.heads for piece in microbatch.pieces if num_heads % piece.heads}):
            where, remedy = f"plan: microbatch {number}: heads", "Plan for this model, or without split heads."
            expected = f"a divisor of the model's {num_heads} attention heads"
            yield PlanError(where, expected=expected, got=str(splits), remedy=remedy)
