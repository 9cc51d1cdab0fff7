"""What a run plans with, on rank 0: costs as measured, corrected by the run's own steps.

A step's seconds are known when the next ones are planned already, so they count from some steps later. Only rank 0
prices: plans, and with them their costs' versions, are sent to all. What neither computing nor transfers explain of a
step, files and the next plan's message for example, is added to its end. Ranks that turn out slower than others are
planned with less work, by the planner that knows speeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from lengthwise.comm import Transport, World
from lengthwise.core.errors import ConfigError, LengthwiseError
from lengthwise.core.measurements import Measurements
from lengthwise.core.plan import Plan
from lengthwise.cost import Cost
from lengthwise.cost.measured import measured_cost
from lengthwise.cost.refit import STEPS, RanStep, rank_speeds, refit
from lengthwise.planner import PlanOptions, score
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.profiler.profile import ProfileSettings, Trained, open_store, profile
from lengthwise.report.figures import percent
from lengthwise.run.job import MEASURING_SECONDS, Job
from lengthwise.session.source import STEPS_AHEAD

_WARM_UP_STEPS = 1  # the oldest that are remembered, of which the first of a run is one
_VERSIONS = 3 + STEPS_AHEAD  # of the costs, by which the plans under way may have been made
_REST_STEPS = 5  # that are priced again each time
_LEAST_TOKENS = 1024  # of the longest sequence that is measured: shorter ones tell little of attention


class Pricing:
    """The costs of a run; `corrects`: whether its steps change them, which makes plans differ from run to run."""

    def __init__(self, job: Job, *, corrects: bool) -> None:
        self._job, self._corrects = job, corrects
        self._start = self.cost = job.planning.cost
        self._end_seconds = {self.cost.version: self.cost.step_end_seconds(job.replicas)}
        self._steps: list[RanStep] = []
        self._corrections, self._said_speeds = 0, False
        self.speeds: tuple[float, ...] | None = None
        self.measurements: Measurements | None = None

    def measure(self, world: World, transport: Transport, trained: Trained) -> str:
        """Measure before the first step, on all ranks together, and price with what was found; say how it fits.

        What is trained stays as it is, to the bit.
        """
        job = self._job
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
        self._start = measured_cost(found)
        self._take(self._start)
        fits = percent(found.fit.mean_error)
        return f"measured {len(found.samples)} samples, which the costs miss by {fits} on average"

    def plan_for(self, job: Job) -> None:
        """Plan from now on with what this job knows: the same run, its capacities measured."""
        self._job = job

    def plan(self, process: PlannerProcess, lengths: Sequence[int]) -> tuple[str, float]:
        """Plan one step with the costs of now (see `PlannerProcess.plan`)."""
        planning = replace(self._job.planning, cost=self.cost)
        options = planning.options
        if self.speeds is not None and _plans_speeds(options):
            planning = replace(planning, options=replace(options, speeds=self.speeds, heads="off"))
        return process.plan(planning, lengths)

    def predicted_step_seconds(self, plan: Plan) -> float:
        """Return the seconds of a step, by the costs that it was planned with; on rank 0, where these are known."""
        end_seconds = self._end_seconds.get(str(plan.notes["cost"]), 0.0)
        return float(plan.notes["predicted_seconds"]) + end_seconds

    def observe(self, step: RanStep) -> str | None:
        """Take in a step that was run; say so, once, when ranks turn out to differ in speed."""
        if not self._corrects:
            return None
        self._steps = [*self._steps[-STEPS:], step]
        told = self._steps[_WARM_UP_STEPS:]
        if told:
            self.speeds = rank_speeds(refit(self._start, told), told)
            cost = _with_rest(refit(self._start, told, self.speeds), told[-_REST_STEPS:], self.speeds)
            self._corrections += 1
            self._take(replace(cost, version=f"{self._start.version} corrected {self._corrections}"))
        if self.speeds is None or self._said_speeds:
            return None
        self._said_speeds = True
        return _unequal(self.speeds, self._job.planning.options)

    def _take(self, cost: Cost) -> None:
        self.cost, self._end_seconds[cost.version] = cost, cost.step_end_seconds(self._job.replicas)
        if len(self._end_seconds) > _VERSIONS:
            del self._end_seconds[next(iter(self._end_seconds))]


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


def _with_rest(cost: Cost, steps: Sequence[RanStep], speeds: Sequence[float] | None) -> Cost:
    """Add to the step's end what these steps took beyond what the costs say; the median of them."""
    equal = [1.0] * steps[-1].plan.ranks  # of a plan that was made for ranks of unequal speed the notes would count
    try:
        said = [
            score(step.plan, cost, speeds=speeds or equal).makespan_seconds + cost.step_end_seconds(step.plan.ranks)
            for step in steps
        ]
    except LengthwiseError:  # a plan of somebody's that these costs do not price
        return cost
    rest = statistics.median(step.step_seconds - each for step, each in zip(steps, said, strict=True))
    clear = max(0.0, cost.ending.clear_seconds + rest)
    return replace(cost, ending=replace(cost.ending, clear_seconds=clear))
