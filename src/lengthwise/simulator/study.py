"""Planners compared on the same batches, simulated: step times, their spread, and how near the ideal they come.

The ideal of a batch is its arithmetic in the largest blocks, spread evenly over all devices, with nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.core.timeline import Timeline
from lengthwise.cost import Choice, Cost, Hardware, StepMemory, analytic_cost, step_flops
from lengthwise.planner import PlanOptions, PlanStep, plan_recomputed, plan_step
from lengthwise.planner.plan_options import DEFAULT
from lengthwise.program import features_of
from lengthwise.simulator.loading import loading_seconds, waits_seconds
from lengthwise.simulator.step import simulate_plan

MODEL_ERROR = 0.05  # between planners under the same costs: docs/benchmarks.md


class TooLarge(PlanError):  # noqa: N818 - the name says what happened
    """A plan that needs more memory than a device has."""


def too_large(needed: float, most: float) -> TooLarge:
    """Return what is raised for a plan that needs so many bytes of a device."""
    remedy = "Use more devices a rank, a smaller {capacity}, or hardware with more memory."
    expected, got = f"at most {most / 1e9:.1f} GB", f"{needed / 1e9:.1f} GB"
    return TooLarge("memory of a device", expected=expected, got=got, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated: a model on so many ranks of a hardware, and what a device of them holds.

    context_tokens: sizes the mesh of planners with a fixed one; no sequence is longer. loader: of
    `simulator.loading.LOADERS`. capacities: tokens of a rank by kinds of recomputation that a step may choose (default:
    none, with the cluster's). must_fit: refuse plans that need more memory than a device has (`cost.memory`).
    """

    memory: StepMemory
    hardware: Hardware
    cost: Cost
    cluster: Cluster
    context_tokens: int
    loader: str = "none"
    capacities: Mapping[str, int] | None = None
    must_fit: bool = False

    @property
    def peak_flops_per_second(self) -> float:
        """Of all devices together."""
        return self.cluster.ranks * self.memory.devices * self.hardware.peak_flops_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One planner on one batch: times in seconds, ratios of all ranks' time, memory of the fullest device in bytes.

    loader_seconds: what all ranks wait for data. bound_seconds: of the plan, without step's end. ideal_seconds: of the
    batch on these devices. recompute: the plan's kind. most_degree, most_heads, most_offload: of any piece or
    microbatch. features: that the plan uses.
    """

    step_seconds: float
    ideal_seconds: float
    bound_seconds: float
    loader_seconds: float
    compute_ratio: float
    exposed_ratio: float
    idle_ratio: float
    memory_bytes: float
    num_tokens: int
    flops: float
    recompute: str
    most_degree: int
    most_heads: int
    most_offload: float
    features: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """One planner over all batches; `first_plan` and `first` are those of the first batch."""

    planner: str
    steps: tuple[SimulatedStep, ...]
    first_plan: Plan
    first: Timeline
    peak_flops_per_second: float

    @property
    def mean_seconds(self) -> float:
        """Step time, mean over batches."""
        return float(np.mean([step.step_seconds for step in self.steps]))

    def percentile_seconds(self, percent: float) -> float:
        """Step time that so many percent of the batches stay below."""
        return float(np.percentile([step.step_seconds for step in self.steps], percent))

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return sum(step.num_tokens for step in self.steps) / self._total_seconds

    @property
    def flops_ratio(self) -> float:
        """Model FLOPs, recomputation left out, over the peak of all devices: MFU."""
        return sum(step.flops for step in self.steps) / self._total_seconds / self.peak_flops_per_second

    @property
    def ideal_ratio(self) -> float:
        """Ideal seconds of the batches over those of the steps: 1 where nothing is lost."""
        return sum(step.ideal_seconds for step in self.steps) / self._total_seconds

    def mean(self, name: str) -> float:
        """Mean over batches of a field of `SimulatedStep`."""
        return float(np.mean([getattr(step, name) for step in self.steps]))

    @property
    def _total_seconds(self) -> float:
        return sum(step.step_seconds for step in self.steps)


def compare_planners(
    planners: Sequence[str],
    batches: Sequence[Sequence[int]],
    setting: Setting,
    *,
    progress: Callable[[str, int], None],
    options: PlanOptions = DEFAULT,
    plan_each: PlanStep = plan_step,
) -> list[PlannerResult]:
    """Plan and simulate every batch, the lengths of a step, with every planner; before each, call `progress`.

    options: the same for all planners; planner, layers and context are set here. plan_each: as for `plan_recomputed`.

    Raises:
        LengthwiseError: of `plan_step`; sequences longer than the context or than the cluster holds are named.
    """
    results = []
    for planner in planners:
        simulated = _simulate(planner, batches, setting, options, partial(progress, planner), plan_each)
        results.append(
            PlannerResult(
                planner=planner,
                steps=_steps(simulated, setting),
                first_plan=simulated[0][0],
                first=simulated[0][1],
                peak_flops_per_second=setting.peak_flops_per_second,
            )
        )
    return results


def _simulate(
    planner: str,
    batches: Sequence[Sequence[int]],
    setting: Setting,
    options: PlanOptions,
    progress: Callable[[int], None],
    plan_each: PlanStep,
) -> list[tuple[Plan, Timeline]]:
    """Plan and simulate every batch, each after the one before and its own data's loading."""
    plans, timelines = [], []
    for number, tokens in enumerate(batches):
        progress(number)
        of_step = replace(
            options,
            planner=planner,
            layers=setting.memory.shape.layers,
            context_tokens=max(setting.context_tokens, *tokens) if planner == "static" else None,
        )
        plan, timeline = _simulate_step(tokens, setting, of_step, plan_each)
        plans.append(plan)
        timelines.append(timeline)
    loads = [
        loading_seconds(
            plan,
            setting.loader,
            setting.cost,
            tokens_per_second=setting.hardware.loader_tokens_per_second,
            devices=setting.memory.devices,
            fixed_mesh=planner == "static",
        )
        for plan in plans
    ]
    waits = waits_seconds(loads, [timeline.step_seconds for timeline in timelines])
    delayed = [timeline.delayed(wait) for timeline, wait in zip(timelines, waits, strict=True)]
    return list(zip(plans, delayed, strict=True))


def _simulate_step(
    tokens: Sequence[int], setting: Setting, options: PlanOptions, plan_each: PlanStep
) -> tuple[Plan, Timeline]:
    """Plan and simulate one batch; where the plan must fit and does not, the better of two that might.

    Capacities do not know that what a layer computes again cannot be offloaded; those two do one of both alone.

    Raises:
        PlanError: of `plan_recomputed`.
        TooLarge: no plan fits.
    """
    capacities = dict(setting.capacities or {"none": setting.cluster.capacity_tokens})

    def simulated(kinds: Mapping[str, int], with_options: PlanOptions) -> tuple[Plan, Timeline]:
        plan = plan_recomputed(tokens, setting.cluster.ranks, setting.cost, kinds, with_options, plan_each=plan_each)
        return plan, simulate_plan(plan, setting.cost)

    first, most = simulated(capacities, options), setting.hardware.device_bytes
    if not setting.must_fit or (needed := needed_bytes(*first, setting.memory)) <= most:
        return first
    again = {kind: held for kind, held in capacities.items() if kind != "none"}
    ways = [({"none": capacities["none"]}, options)] if again and "none" in capacities else []
    ways += [(again or capacities, replace(options, offload="off"))] if options.offload != "off" else []
    fitting: list[tuple[Plan, Timeline]] = []
    for kinds, with_options in ways:
        try:
            found = simulated(kinds, with_options)
        except PlanError:
            continue
        if needed_bytes(*found, setting.memory) <= most:
            fitting.append(found)
    if not fitting:
        raise too_large(needed, most)
    return min(fitting, key=lambda each: each[1].step_seconds)


def ideal_seconds(tokens: Sequence[int], setting: Setting) -> float:
    """Return the arithmetic of a batch, in the largest blocks, spread evenly; with one device a rank, of the costs."""
    devices = setting.memory.devices
    cost = analytic_cost(setting.memory.shape, setting.hardware)
    if devices == 1:
        compute = {"quadratic_seconds": setting.cost.quadratic_seconds, "linear_seconds": setting.cost.linear_seconds}
        cost = replace(cost, **compute)
    alone = cost.compute_seconds(np.array(tokens, dtype=np.int64))
    return float(alone.sum()) / (setting.cluster.ranks * devices)


def _steps(simulated: Sequence[tuple[Plan, Timeline]], setting: Setting) -> tuple[SimulatedStep, ...]:
    return tuple(
        SimulatedStep(
            step_seconds=timeline.step_seconds,
            ideal_seconds=ideal_seconds(plan.tokens, setting),
            bound_seconds=float(plan.notes["bound_seconds"]),
            loader_seconds=timeline.loader_seconds,
            compute_ratio=timeline.compute_ratio,
            exposed_ratio=timeline.exposed_ratio,
            idle_ratio=timeline.idle_ratio,
            memory_bytes=needed_bytes(plan, timeline, setting.memory),
            num_tokens=sum(plan.tokens),
            flops=step_flops(setting.memory.shape, plan.tokens),
            recompute=plan.microbatches[0].recompute,
            most_degree=max(piece.degree for microbatch in plan.microbatches for piece in microbatch.pieces),
            most_heads=max(piece.heads for microbatch in plan.microbatches for piece in microbatch.pieces),
            most_offload=max(microbatch.offload for microbatch in plan.microbatches),
            features=features_of(plan),
        )
        for plan, timeline in simulated
    )


def needed_bytes(plan: Plan, timeline: Timeline, memory: StepMemory) -> float:
    """Return the bytes of the fullest device: what lies there, and the most microbatches that it keeps at once."""
    cut, first = memory.cut, timeline.stage == 0
    rank, microbatch, held = timeline.rank[first], timeline.microbatch[first], timeline.held_tokens[first]
    together = np.minimum(np.bincount(rank, weights=held > 0) / cut.virtual, cut.microbatches_kept)
    kinds = np.array([each.recompute for each in plan.microbatches])[microbatch]
    offload = np.array([each.offload for each in plan.microbatches])[microbatch]
    largest = 0.0
    for kind in np.unique(kinds).tolist():
        tokens, ratio, kept = (each[kinds == kind] for each in (held, offload, together[rank]))
        needed = memory.microbatch_bytes(tokens, Choice(recompute=kind, offload=ratio), kept=kept)
        largest = max(largest, float(np.max(needed)))
    return memory.state_bytes() + memory.gathered_bytes() + largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much sooner one planner ends than another: `ratio` of mean step seconds over the same batches.

    Between `low` and `high` the simulation cannot tell: the model's error, a share of the ratio, and two standard
    errors over the batches.
    """

    ratio: float
    low: float
    high: float
    batches: int

    @property
    def is_equal(self) -> bool:
        """Whether the two cannot be told apart."""
        return self.low <= 1 <= self.high


def gain_over(
    other_seconds: Sequence[float], our_seconds: Sequence[float], *, model_error: float = MODEL_ERROR
) -> Gain:
    """Compare step seconds of the same batches, batch i in entry i of both; `model_error`: share of the ratio."""
    other, ours = np.array(other_seconds, dtype=np.float64), np.array(our_seconds, dtype=np.float64)
    assert len(other) == len(ours) > 0, f"{len(other)} and {len(ours)} batches"
    ratio = float(other.sum() / ours.sum())
    spread = 0.0
    if len(ours) > 1:
        spread = 2 * float(np.std(other - ratio * ours, ddof=1)) / float(ours.mean()) / len(ours) ** 0.5
    error = model_error * ratio + spread
    return Gain(ratio=ratio, low=ratio - error, high=ratio + error, batches=len(ours))


def gain_text(gain: Gain) -> str:
    """Write a gain for a table: 1.23x, or `equal` where it cannot be told from none."""
    return f"equal ({gain.ratio:.2f}x)" if gain.is_equal else f"{gain.ratio:.2f}x"
