"""A planner on a mesh: its plan of every batch, simulated: step times, their ratio to the ideal, and memory.

The ideal time of a batch is its arithmetic in the largest blocks, spread evenly over all devices, without waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan, images_beside
from lengthwise.core.prefixes import SharedPrefixes
from lengthwise.core.timeline import Timeline
from lengthwise.cost import Choice, Cost, StepMemory, analytic_cost, lengths_of, step_flops
from lengthwise.planner import PACKED_DP, PlanOptions, PlanStep, plan_recomputed, plan_step, with_mixes
from lengthwise.planner.prefixes import alone, plan_apart, saved_ratio
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.simulator.clocks import simulate_plan
from lengthwise.simulator.meshes import RankMesh, Setting


class TooLarge(PlanError):  # noqa: N818 - the name says what happened
    """A plan that needs more memory than a device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One planner on one batch: times in seconds, ratios of all ranks' time, memory of the fullest device in bytes.

    bound_seconds: bound of the plan, without the step's end. ideal_seconds: ideal time of the batch on these devices.
    num_tokens, flops: tokens of whole sequences, without padding, and the decoder's FLOPs. computed_tokens: tokens of
    the plan, padding and repeated prefixes included. saved_ratio: as `planner.prefixes.saved_ratio`. recompute,
    capacity_tokens: those of the plan. most_degree, most_heads, most_offload: largest value of any piece or microbatch.
    shares_prompts: True if the plan computes a prompt once for several sequences.
    """

    step_seconds: float
    ideal_seconds: float
    bound_seconds: float
    compute_ratio: float
    exposed_ratio: float
    idle_ratio: float
    memory_bytes: float
    num_tokens: int
    computed_tokens: int
    saved_ratio: float | None
    flops: float
    recompute: str
    capacity_tokens: int
    most_degree: int
    most_heads: int
    most_offload: float
    shares_prompts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A planner on a mesh, simulated on every batch. first_plan, first: plan and timeline of the first batch."""

    planner: str
    setting: Setting
    steps: tuple[SimulatedStep, ...]
    first_plan: Plan
    first: Timeline

    @property
    def mesh(self) -> RankMesh:
        """The mesh of the planner."""
        return self.setting.mesh

    @property
    def held_tokens(self) -> dict[str, int]:
        """Tokens that a rank holds, by the kinds of recomputation in its plans."""
        return {step.recompute: step.capacity_tokens for step in self.steps}

    @property
    def step_seconds(self) -> list[float]:
        """Step time of each batch."""
        return [step.step_seconds for step in self.steps]

    @property
    def mean_seconds(self) -> float:
        """Step time, mean over batches."""
        return self.mean("step_seconds")

    def percentile_seconds(self, percent: float) -> float:
        """Return the step time that this percentage of the batches does not exceed."""
        return float(np.percentile(self.step_seconds, percent))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.mean("num_tokens") / self.mean_seconds

    @property
    def flops_ratio(self) -> float:
        """MFU: model FLOPs, without recomputation, over the peak of all devices."""
        memory, peak = self.setting.memory, self.setting.hardware.peak_flops_per_second
        return self.mean("flops") / self.mean_seconds / (memory.ranks * memory.devices * peak)

    @property
    def ideal_ratio(self) -> float:
        """Ideal seconds of the batches over those of the steps; 1 means that nothing is lost."""
        return self.mean("ideal_seconds") / self.mean_seconds

    def mean(self, name: str) -> float:
        """Return the mean over batches of a field of `SimulatedStep`."""
        return float(np.mean([getattr(step, name) for step in self.steps]))

    def most(self, name: str) -> float:
        """Return the largest value over batches of a field of `SimulatedStep`."""
        return max(getattr(step, name) for step in self.steps)


def run_batches(
    planner: str,
    batches: Sequence[Sequence[int]],
    setting: Setting,
    *,
    plan_each: PlanStep = plan_step,
    shared: Callable[[Sequence[int]], SharedPrefixes] | None = None,
) -> Found:
    """Plan and simulate every batch, the lengths of a step, perhaps `WithImages`.

    plan_each: as for `plan_recomputed`. shared: function that returns the prefixes of a batch that its plan may compute
    once; with it, batches are planned as a run plans them, without `plan_each`. TooLarge: no plan of a batch fits the
    memory of a device. Other errors are those of `plan_step`.
    """
    options, is_static = replace(setting.options, planner=planner), planner == "static"
    runs = [
        _plan_and_simulate(
            tokens,
            setting,
            replace(options, context_tokens=max(setting.context_tokens, *tokens) if is_static else None),
            plan_each,
            shared and shared(tokens),
        )
        for tokens in batches
    ]
    steps = tuple(_step(tokens, *run, setting) for tokens, run in zip(batches, runs, strict=True))
    return Found(planner=planner, setting=setting, steps=steps, first_plan=runs[0][0], first=runs[0][1])


def _plan_and_simulate(
    tokens: Sequence[int], setting: Setting, options: PlanOptions, plan_each: PlanStep, shared: SharedPrefixes | None
) -> tuple[Plan, Timeline]:
    """Plan and simulate one batch; if the plan must fit and does not, return the better of two that might.

    Capacities do not know that recomputed activations cannot be offloaded; one of the two recomputes, one offloads.
    """

    images, lock_step = images_beside(tokens), setting.mesh.lock_step

    def simulated(kinds: Mapping[str, int], with_options: PlanOptions) -> tuple[Plan, Timeline]:
        ranks, cost = setting.memory.ranks, setting.cost

        def planned(lengths: Sequence[int], costs: Cost) -> Plan:
            context = with_options.context_tokens and max(with_options.context_tokens, *lengths)
            choices = replace(with_options, context_tokens=context)
            mixed = with_mixes(kinds, max(lengths), ranks, choices)
            return plan_recomputed(lengths, ranks, costs, mixed, choices, plan_each=plan_each)

        if shared is None:
            sharing = lock_step.degree if lock_step else 1 if options.planner == PACKED_DP else ranks
            plan = plan_apart(tokens, sharing * max(kinds.values()), cost, planned, images)
        else:
            planning = StepPlanning(ranks=ranks, cost=cost, capacities=kinds, options=with_options)
            plan = planning.plan(tokens, shared, images)
        return plan, simulate_plan(plan, cost)

    capacities, most = setting.capacities, setting.hardware.device_bytes
    first = simulated(capacities, options)
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
        remedy = "Use more devices a rank, a smaller {capacity}, or hardware with more memory."
        expected, got = f"at most {most / 1e9:.1f} GB", f"{needed / 1e9:.1f} GB"
        raise TooLarge("memory of a device", expected=expected, got=got, remedy=remedy)
    return min(fitting, key=lambda each: each[1].step_seconds)


def ideal_seconds(tokens: Sequence[int], setting: Setting) -> float:
    """Return the arithmetic of a batch in seconds, in the largest blocks, spread evenly over all devices."""
    memory = setting.memory
    cost = analytic_cost(memory.shape, setting.hardware)
    if memory.devices == 1:
        compute = {"quadratic_seconds": setting.cost.quadratic_seconds, "linear_seconds": setting.cost.linear_seconds}
        cost = replace(cost, **compute)
    lengths, images = tuple(tokens), images_beside(tokens)
    if any(images):
        lengths, cost = lengths_of(alone(tokens, images), replace(cost, image_ratio=setting.cost.image_ratio))
    seconds = cost.compute_seconds(np.array(lengths, dtype=np.int64))
    return float(seconds.sum()) / (memory.ranks * memory.devices)


def _step(tokens: Sequence[int], plan: Plan, timeline: Timeline, setting: Setting) -> SimulatedStep:
    pieces = [piece for microbatch in plan.microbatches for piece in microbatch.pieces]
    return SimulatedStep(
        step_seconds=timeline.step_seconds,
        ideal_seconds=ideal_seconds(tokens, setting),
        bound_seconds=float(plan.notes["bound_seconds"]),
        compute_ratio=timeline.compute_ratio,
        exposed_ratio=timeline.exposed_ratio,
        idle_ratio=timeline.idle_ratio,
        memory_bytes=needed_bytes(plan, timeline, setting.memory),
        num_tokens=sum(tokens),
        computed_tokens=sum(plan.tokens),
        saved_ratio=saved_ratio(plan),
        flops=step_flops(setting.memory.shape, tokens),
        recompute=plan.microbatches[0].recompute,
        capacity_tokens=plan.capacity,
        most_degree=max(piece.degree for piece in pieces),
        most_heads=max(piece.heads for piece in pieces),
        most_offload=max(microbatch.offload for microbatch in plan.microbatches),
        shares_prompts=bool(plan.parents),
    )


def needed_bytes(plan: Plan, timeline: Timeline, memory: StepMemory) -> float:
    """Return the bytes of the fullest device: its states, and the most microbatches that it keeps at once."""
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
