"""How the steps of a run are planned: everything but their lengths, in one record, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lengthwise.core.errors import PlanError
from lengthwise.core.held import fullest_tokens, kept_ratio
from lengthwise.core.plan import Images, Plan
from lengthwise.core.prefixes import SharedPrefixes
from lengthwise.cost import Cost, StepMemory, laid_cost
from lengthwise.planner import PACKED_DP, PLANNING_SHARE, PlanOptions, options_of, plan_recomputed, with_mixes
from lengthwise.planner.prefixes import plan_apart, plan_shared, work_left
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.program import check_plan

LEAST_SAVED = 0.05  # of the predicted time, by a plan with shared prefixes
_MOST_HELD = 1.01  # times the capacity, by the rounding of short sequences of a tree
_TRIES = 4  # capacities to plan trees with


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlanning:
    """Plans the steps of a run.

    capacities: tokens that a rank's device holds in a microbatch, by kind of recomputation to choose from.
    offload_ratio: ratio of every microbatch, None for what `options` and each one need.
    measured: measurements behind the capacities, None for given ones. notes: notes of every plan.
    """

    ranks: int
    cost: Cost
    capacities: Mapping[str, int]
    options: PlanOptions
    offload_ratio: float | None = None
    measured: Capacities | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def plan(self, lengths: Sequence[int], shared: SharedPrefixes | None = None, images: Images = ()) -> Plan:
        """Plan one step; `check_plan` accepts the plan.

        shared: prefixes that the step may compute once. It does if that saves more than 5 % of the predicted time. A
            note has the other plan's seconds, by its work alone if that rules it out. images: the work on images.

        Raises:
            LengthwiseError: there is no plan.
        """
        apart = plan_apart(lengths, self.longest_tokens, self.cost, self._plan, images)
        if shared is None or not any(shared.common):
            return apart
        sizes, seconds_apart = reversed(self._sizes(lengths, apart.capacity)), _seconds(apart)
        # Sizes with equal work have the same trees; the smallest of them stays.
        by_work = {work_left(lengths, shared, size, self.cost, images): size for size in sizes}
        found = {ratio: size for ratio, size in by_work.items() if ratio is not None}
        if not found:
            return apart
        paying = [size for ratio, size in found.items() if ratio < 1 - LEAST_SAVED]
        if not paying:
            return replace(apart, notes={**apart.notes, "seconds_shared": min(found) * seconds_apart})
        once = self._shared(lengths, shared, images, paying)
        if once is None:
            return apart
        if _seconds(once) >= (1 - LEAST_SAVED) * seconds_apart:
            return replace(apart, notes={**apart.notes, "seconds_shared": _seconds(once)})
        check_plan(once)
        return replace(once, notes={**once.notes, "seconds_apart": seconds_apart})

    def _sizes(self, lengths: Sequence[int], capacity: int) -> list[int]:
        """Return the tokens of the largest trees to try: on one rank, or cut over the ranks of a node or over all."""
        of_rank, longest = -(-sum(lengths) // self.ranks), self.longest_tokens
        node = capacity * min(self.ranks, self.cost.ranks_per_node)
        sizes = {min(capacity, size) for size in (of_rank // 2, of_rank, 2 * of_rank)}
        return sorted(sizes | {min(limit, longest, 2 * of_rank) for limit in (node, longest)})

    def _shared(
        self, lengths: Sequence[int], shared: SharedPrefixes, images: Images, sizes: Sequence[int]
    ) -> Plan | None:
        """Return the fastest plan that computes shared prefixes once, or None if no trees fit.

        All sizes together get the seconds of one plan: in much less, plans of large trees were up to 17 % slower, and
        another size was best.
        """
        share = PLANNING_SHARE / len(sizes)
        plans = [self._shared_up_to(size, lengths, shared, images, planning_share=share) for size in sizes]
        return min(filter(None, plans), key=_seconds, default=None)

    def _shared_up_to(
        self, most_tokens: int, lengths: Sequence[int], shared: SharedPrefixes, images: Images, *, planning_share: float
    ) -> Plan | None:
        """Return a plan with trees of so many tokens at most, or None without one that ranks can hold.

        Planners cut a tree as one sequence. Its sequences are cut each by itself, and those of fewer tokens than a ring
        has chunks lie on the same positions: these then hold more. Such a step is planned with less capacity.
        """
        part = 1.0
        for _ in range(_TRIES):
            narrower = replace(self, capacities={kind: int(part * each) for kind, each in self.capacities.items()})
            planned = partial(narrower._plan, planning_share=planning_share)
            try:
                plan = plan_shared(lengths, shared, int(part * most_tokens), self.cost, planned, images)
            except PlanError:
                return None  # a sequence is too long for less capacity; whole rows can be planned
            if plan is None:
                return None
            most = _MOST_HELD * plan.capacity / part + plan.parents.count(None)
            held = max(fullest_tokens(plan, each) * kept_ratio(each.offload, plan.layers) for each in plan.microbatches)
            if held <= most:
                return plan
            part *= most / held
        return None

    def _plan(self, lengths: Sequence[int], cost: Cost, *, planning_share: float = PLANNING_SHARE) -> Plan:
        held = self._held()
        if "none" in held:  # recomputing costs time, and pays only through a larger capacity
            held = {kind: tokens for kind, tokens in held.items() if kind == "none" or tokens > held["none"]}
        context_tokens = max(self.options.context_tokens or 1, *lengths)
        options = replace(self.options, context_tokens=context_tokens, planning_share=planning_share)
        if sum(lengths) <= min(held.values()):  # one rank could hold all of them
            options = replace(options, offload="off")
        kinds = held if self.offload_ratio else with_mixes(held, max(lengths), self.ranks, options)
        plan = plan_recomputed(tuple(lengths), self.ranks, cost, kinds, options)
        if self.offload_ratio:
            microbatches = tuple(replace(microbatch, offload=self.offload_ratio) for microbatch in plan.microbatches)
            capacity = self.capacities[plan.microbatches[0].recompute]
            plan = replace(plan, capacity=capacity, microbatches=microbatches)
        elif self.measured is not None:
            memory, narrower = self.measured.memory, replace(self, capacities=self.measured.offloading, measured=None)
            plan = memory.with_offload(plan) or narrower._plan(lengths, cost, planning_share=planning_share)
        check_plan(plan)
        return replace(plan, notes={**plan.notes, **self.notes})

    @property
    def most_held_tokens(self) -> int:
        """The most tokens that a rank holds, with all allowed offload."""
        if self.measured is not None and not self.offload_ratio:
            narrower = replace(self, capacities=self.measured.offloading, measured=None)
            return max(*self.capacities.values(), narrower.most_held_tokens)
        return max(
            self.cost.choosing(replace(self.options, recompute=kind).choices(capacity)).most_held_tokens(capacity)
            for kind, capacity in self._held().items()
        )

    @property
    def longest_tokens(self) -> int:
        """The length of the longest sequence that fits on all ranks, or on one if the planner cuts none."""
        return (1 if self.options.planner == PACKED_DP else self.ranks) * self.most_held_tokens

    def _held(self) -> dict[str, int]:
        kept = kept_ratio(self.offload_ratio or 0.0, self.options.layers)
        return {kind: int(capacity / kept) for kind, capacity in self.capacities.items()}


def _seconds(plan: Plan) -> float:
    return float(plan.notes["predicted_seconds"])


def step_planning(
    memory: StepMemory,
    cost: Cost,
    capacities: Mapping[str, int],
    *,
    offload: str | float = "off",
    measured: Capacities | None = None,
    **choices: Any,
) -> StepPlanning:
    """Return the planning of steps in a layout.

    cost: costs with whole parameters and optimizer on every device. offload: off, auto, or every microbatch's ratio.
    choices: further fields of `PlanOptions`.
    """
    is_given = not isinstance(offload, str)
    return StepPlanning(
        ranks=memory.ranks,
        cost=laid_cost(cost, memory),
        capacities=capacities,
        measured=measured,
        options=options_of(memory, offload="off" if is_given else offload, **choices),
        offload_ratio=offload if is_given else None,
    )
