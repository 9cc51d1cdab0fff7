"""Ranks that compute slower than others, by the steps that ran; they get less work, if the planner supports speeds.

A step's seconds are known when the next steps are already planned, so they count some steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lengthwise.cost.rank_speeds import STEPS, RanStep, rank_speeds
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.step_planning import StepPlanning

_WARM_UP_STEPS = 1  # the oldest remembered step does not count: it may be the first


@dataclass(slots=True, kw_only=True)
class SlowRanks:
    """Follows the speeds of ranks over measured costs, so that plans differ between runs.

    speeds: relative speed of each rank, the fastest 1; None if all are alike.
    """

    speeds: tuple[float, ...] | None = None
    _steps: list[RanStep] = field(default_factory=list)
    _has_said: bool = False

    def planned_for(self, planning: StepPlanning) -> StepPlanning:
        """Return a planning that gives slow ranks less work, if its planner can; rings then split no heads."""
        if self.speeds is None or not _plans_speeds(planning.options):
            return planning
        return replace(planning, options=replace(planning.options, speeds=self.speeds, heads="off"))

    def observe(self, planning: StepPlanning, step: RanStep) -> str | None:
        """Note a finished step; return a note the first time that ranks differ in speed."""
        if len(step.busy_seconds) != step.plan.ranks:  # several stages are one rank of a plan
            return None
        self._steps = [*self._steps[-STEPS:], step]
        self.speeds = rank_speeds(planning.cost, self._steps[_WARM_UP_STEPS:])
        if self.speeds is None or self._has_said:
            return None
        self._has_said = True
        return _unequal(self.speeds, planning.options)


def _plans_speeds(options: PlanOptions) -> bool:
    return (options.planner, options.offload, options.mode) == ("lengthwise", "off", "free")


def _unequal(speeds: Sequence[float], options: PlanOptions) -> str:
    slowest = min(speeds)
    found = f"rank {speeds.index(slowest)} computes at {slowest:.0%} of the fastest rank's speed"
    if not _plans_speeds(options):
        return f"{found}; it gets no less work: only planner lengthwise does that, without offload auto and shard zero3"
    if options.heads == "off":
        return f"{found}; it gets less work"
    return f"{found}; it gets less work, and while ranks differ no ring splits heads (heads: {options.heads})"
