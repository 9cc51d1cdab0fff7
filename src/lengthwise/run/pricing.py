"""The costs that rank 0 plans with: estimated or measured, and the speeds of the ranks.

A step's seconds are known when the next steps are already planned, so they count some steps later. Slower ranks get
less work, if the planner supports speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lengthwise.comm import Transport, World
from lengthwise.core.errors import ConfigError
from lengthwise.core.measurements import Measurements
from lengthwise.core.plan import Plan
from lengthwise.cost.measured import measured_cost
from lengthwise.cost.rank_speeds import STEPS, RanStep, rank_speeds
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.profiler.rank_profiler import ProfileSettings, Trained, open_store, profile
from lengthwise.report.figures import percent
from lengthwise.run.job import MEASURING_SECONDS, Job

_WARM_UP_STEPS = 1  # the oldest remembered step does not count: it may be the run's first
_LEAST_TOKENS = 1024  # least length of the longest measured sequence: shorter ones say little about attention


class Pricing:
    """The costs of a run. follows_speeds: give slow ranks less work, so that plans differ between runs."""

    def __init__(self, planning: StepPlanning, *, follows_speeds: bool) -> None:
        self._options, self._ranks, self._follows_speeds = planning.options, planning.ranks, follows_speeds
        self.cost = planning.cost
        self._steps: list[RanStep] = []
        self._said_speeds = False
        self.speeds: tuple[float, ...] | None = None
        self.measurements: Measurements | None = None

    def measure(self, job: Job, world: World, transport: Transport, trained: Trained) -> str:
        """Measure before the first step, and plan with the measured costs; return a note on their fit. Collective.

        Parameters and states do not change by a bit.
        """
        settings = ProfileSettings(
            seconds=MEASURING_SECONDS,
            longest_tokens=max(_LEAST_TOKENS, *job.capacities.values()),
            precision=job.precision,
            clock="wall",
            hardware=job.hardware,
            computing=job.computing,
        )
        offload = job.config.offload
        disk = offload.path if offload is not None and offload.store == "disk" else None
        store = open_store(world.device, disk, where=f"rank {world.rank}")
        try:
            self.measurements = found = profile(job.model, world, transport, settings, trained=trained, store=store)
        except ConfigError as error:  # about the samples, which are the same on all ranks
            return f"not measured, planned by estimates for the device: {error}"
        finally:
            if store is not None:
                store.close()
        self.cost = measured_cost(found)
        fits = percent(found.fit.mean_error)
        return f"measured {len(found.samples)} samples; the costs fit them with a mean error of {fits}"

    def priced(self, planning: StepPlanning) -> StepPlanning:
        """Return a planning with the current costs and speeds."""
        planning = replace(planning, cost=self.cost)
        if self.speeds is None or not _plans_speeds(planning.options):
            return planning
        return replace(planning, options=replace(planning.options, speeds=self.speeds, heads="off"))

    def predicted_step_seconds(self, plan: Plan) -> float:
        """Return a step's seconds by the costs of its plan."""
        return float(plan.notes["predicted_seconds"]) + self.cost.step_end_seconds(self._ranks)

    def observe(self, step: RanStep) -> str | None:
        """Note a finished step; return a note the first time that ranks differ in speed."""
        if not self._follows_speeds:
            return None
        self._steps = [*self._steps[-STEPS:], step]
        self.speeds = rank_speeds(self.cost, self._steps[_WARM_UP_STEPS:])
        if self.speeds is None or self._said_speeds:
            return None
        self._said_speeds = True
        return _unequal(self.speeds, self._options)


def _plans_speeds(options: PlanOptions) -> bool:
    """Return whether the planner supports unequal speeds; it then splits no heads."""
    return (options.planner, options.offload, options.mode) == ("lengthwise", "off", "free")


def _unequal(speeds: Sequence[float], options: PlanOptions) -> str:
    """Describe unequal speeds and their effect on plans."""
    slowest = min(speeds)
    found = f"rank {speeds.index(slowest)} computes at {percent(slowest)} of the fastest rank's speed"
    if not _plans_speeds(options):
        return f"{found}; it gets no less work: only planner lengthwise does that, without offload auto and shard zero3"
    if options.heads == "off":
        return f"{found}; it gets less work"
    return f"{found}; it gets less work, and while ranks differ no ring splits heads (heads: {options.heads})"
