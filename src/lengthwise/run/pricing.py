"""What a run plans with, on rank 0: costs, as measured where that was asked for, and how fast its ranks are.

A step's seconds are known when the next ones are planned already, so they count from some steps later. Ranks that turn
out slower than others are planned with less work, by the planner that knows speeds.
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

_WARM_UP_STEPS = 1  # the oldest that are remembered, of which the first of a run is one
_LEAST_TOKENS = 1024  # of the longest sequence that is measured: shorter ones tell little of attention


class Pricing:
    """The costs of a run that `planning` plans; `follows_speeds`: slow ranks get less work, so plans differ by run."""

    def __init__(self, planning: StepPlanning, *, follows_speeds: bool) -> None:
        self._options, self._ranks, self._follows_speeds = planning.options, planning.ranks, follows_speeds
        self.cost = planning.cost
        self._steps: list[RanStep] = []
        self._said_speeds = False
        self.speeds: tuple[float, ...] | None = None
        self.measurements: Measurements | None = None

    def measure(self, job: Job, world: World, transport: Transport, trained: Trained) -> str:
        """Measure before the first step, on all ranks together, and price with what was found; say how it fits.

        What is trained stays as it is, to the bit.
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
        except ConfigError as error:  # of the samples, which are the same on all ranks
            return f"not measured, planned by estimates for the device: {error}"
        finally:
            if store is not None:
                store.close()
        self.cost = measured_cost(found)
        fits = percent(found.fit.mean_error)
        return f"measured {len(found.samples)} samples, which the costs miss by {fits} on average"

    def priced(self, planning: StepPlanning) -> StepPlanning:
        """Return a planning with the costs and speeds of now."""
        planning = replace(planning, cost=self.cost)
        if self.speeds is None or not _plans_speeds(planning.options):
            return planning
        return replace(planning, options=replace(planning.options, speeds=self.speeds, heads="off"))

    def predicted_step_seconds(self, plan: Plan) -> float:
        """Return the seconds of a step, by the costs that it was planned with."""
        return float(plan.notes["predicted_seconds"]) + self.cost.step_end_seconds(self._ranks)

    def observe(self, step: RanStep) -> str | None:
        """Take in a step that was run; say so, once, when ranks turn out to differ in speed."""
        if not self._follows_speeds:
            return None
        self._steps = [*self._steps[-STEPS:], step]
        self.speeds = rank_speeds(self.cost, self._steps[_WARM_UP_STEPS:])
        if self.speeds is None or self._said_speeds:
            return None
        self._said_speeds = True
        return _unequal(self.speeds, self._options)


def _plans_speeds(options: PlanOptions) -> bool:
    """Return whether steps can be planned with unequal speeds; split heads are then left out."""
    return (options.planner, options.offload, options.mode) == ("lengthwise", "off", "free")


def _unequal(speeds: Sequence[float], options: PlanOptions) -> str:
    """Say what unequal speeds change in plans, and what they do not."""
    slowest = min(speeds)
    found = f"rank {speeds.index(slowest)} computes at {percent(slowest)} of the fastest rank's speed"
    if not _plans_speeds(options):
        return f"{found}; it gets no less work: only planner lengthwise does that, without offload auto and shard zero3"
    if options.heads == "off":
        return f"{found}; it gets less work"
    return f"{found}; it gets less work, and while ranks differ no ring splits heads (heads: {options.heads})"
