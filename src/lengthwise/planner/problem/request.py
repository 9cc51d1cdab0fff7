"""The request that every planner gets: checked lengths, a cluster that can hold them, and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import ROUNDING_TOKENS
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.core.shape import UNCUT, Cluster, LayerCut
from lengthwise.cost import Cost
from lengthwise.planner.problem.bounds import launches_makespan, least_makespan
from lengthwise.planner.problem.degrees import (
    GROWTH_FLOOR_TOKENS,
    DegreeTable,
    cheapest_degrees,
    fewest_degrees,
    hidden_degrees,
    most_degrees,
    useful_degrees,
)
from lengthwise.planner.problem.step_lengths import ROUNDING
from lengthwise.planner.problem.topology import Extras, Topology


@dataclass(frozen=True, kw_only=True)  # without slots, for what is computed once
class PlanRequest:
    """One step to plan. context_tokens: context of a fixed mesh (default: the longest sequence).

    If ranks have unequal speeds, `cost` is that of the mean speed, and `speeds` are relative to it, along the line.
    Each rank is a pipeline of `stages` stages with `virtual` chunks of layers each.
    """

    tokens: tuple[int, ...]
    cluster: Cluster
    cost: Cost
    context_tokens: int | None = None
    speeds: tuple[float, ...] | None = None
    stages: int = 1
    virtual: int = 1
    planning_share: float | None = None

    @property
    def cut(self) -> LayerCut:
        """The pipeline of each rank."""
        return LayerCut(stages=self.stages, virtual=self.virtual)

    @property
    def priced_stages(self) -> int:
        """The stages of the plan's score: in mode `free` those of the costs, too."""
        return max(self.stages, self.cost.stages)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The lengths as a read-only array, in the order of `tokens`."""
        lengths = np.array(self.tokens, dtype=np.int64)
        lengths.setflags(write=False)  # shared by all callers
        return lengths

    def draft(self, microbatches: Sequence[Microbatch]) -> Plan:
        """Return a plan to be scored while planning."""
        return Plan(
            ranks=self.cluster.ranks,
            layers=1,
            capacity=self.cluster.capacity_tokens,
            tokens=self.tokens,
            microbatches=tuple(microbatches),
        )

    @cached_property
    def most_compute_seconds(self) -> float:
        """The most arithmetic of any sequence, in seconds on one rank."""
        return float(self.cost.compute_seconds(self.lengths).max())

    @property
    def planning_seconds(self) -> float:
        """The limit of the seconds spent on tries beyond the search."""
        return inf if self.planning_share is None else self.planning_share * self.bound_seconds

    @cached_property
    def topology(self) -> Topology:
        """How much longer rings take at each place of the line."""
        return Topology(self.cost, self.cluster.ranks, self.speeds, self.cluster.capacity_tokens)

    def ring_extra_seconds(self, sequence: int, degree: int) -> Extras | None:
        """Return what the topology adds to a ring of one sequence."""
        return self.topology.extra_seconds(self.tokens[sequence], degree)

    @property
    def packs_beside_rings(self) -> bool:
        """Whether local packs may join a ring's microbatch: it saves a launch and delays no other rank."""
        return self.cost.fixed_seconds > 0 and not self.cost.couples_layers

    @cached_property
    def most_held_tokens(self) -> int:
        """The most tokens of one piece on a rank: the capacity, or more with offload."""
        return self.cost.most_held_tokens(self.cluster.capacity_tokens)

    @cached_property
    def fewest_degrees(self) -> NDArray[np.int64]:
        """The fewest ranks that hold each sequence, whatever its offload costs."""
        return fewest_degrees(self.cost, self.lengths, self.cluster)

    @cached_property
    def hidden_degrees(self) -> NDArray[np.int64]:
        """The fewest ranks that hold each sequence with an offload that costs no time."""
        return self._of_unique(hidden_degrees)

    @cached_property
    def least_degrees(self) -> NDArray[np.int64]:
        """The degree of each sequence with the fewest rank-seconds; growth starts there."""
        least = self._of_unique(partial(cheapest_degrees, only=self.useful_degrees))
        if self.speeds is None:
            return least
        levelled = np.ceil(self.lengths * (max(self.speeds) / self.cluster.capacity_tokens)).astype(np.int64)
        return np.where(least > 1, np.minimum(np.maximum(levelled, least), self.cluster.ranks), least)

    @cached_property
    def useful_degrees(self) -> NDArray[np.int64] | None:
        """The degrees worth trying, or None if all are."""
        return useful_degrees(self.cost, self.cluster.ranks)

    def growth(
        self, lengths: NDArray[np.int64], least: NDArray[np.int64], floor_tokens: int | None = None
    ) -> DegreeTable:
        """Return the degrees of some lengths, down to a floor of tokens per rank (default: `floor_tokens`)."""
        only, floor = self.useful_degrees, floor_tokens or self.floor_tokens
        most = most_degrees(lengths, least, self.cluster.ranks, floor, only=only)
        return DegreeTable(self.cost, lengths, least, most, only=only)

    @property
    def floor_tokens(self) -> int:
        """The tokens per rank at which growth usually stops: 4,096, or half the capacity if that is less."""
        return min(GROWTH_FLOOR_TOKENS, max(1, self.cluster.capacity_tokens // 2))

    def _of_unique(self, find: Callable[[Cost, NDArray[np.int64], Cluster], NDArray[np.int64]]) -> NDArray[np.int64]:
        if not self.cost.chooses:
            return self.fewest_degrees
        lengths, places = np.unique(self.lengths, return_inverse=True)
        return find(self.cost, lengths, self.cluster)[places]

    def least_seconds(self, *, lone_rings: bool = True, shared_launches: bool = False, cut: LayerCut = UNCUT) -> float:
        """Return `least_makespan` of this step; launches may count in parts."""
        return least_makespan(
            self.lengths,
            self.cluster,
            self.cost,
            topology=self.topology,
            lone_rings=lone_rings,
            shared_launches=shared_launches,
            cut=cut,
        )

    @cached_property
    def bound_seconds(self) -> float:
        """The bound for plans in which every ring holds one sequence."""
        return max(self.least_seconds(), self._launches_seconds)

    @cached_property
    def shared_bound_seconds(self) -> float:
        """The bound if rings may share their launches with local packs."""
        if self.cost.fixed_seconds == 0:
            return self.bound_seconds
        return max(self.least_seconds(shared_launches=True), self._launches_seconds)

    def in_waves(self, seconds: float) -> float:
        """Return a bound for waves, gathers included, of a step that takes `seconds` without lock-step.

        As few even waves as hold all tokens take least; if one sequence sets a wave, they are not even.
        """
        held = self.cluster.ranks * (self.most_held_tokens + ROUNDING_TOKENS)
        waves = -(-int(self.lengths.sum()) // held)
        if self.speeds is None:
            seconds = max(seconds, self._with_longest_seconds(held) + waves * self.cost.fixed_seconds)
        return waves * float(self.cost.wave_seconds(seconds / waves, self.cost.choices.recompute))

    def _with_longest_seconds(self, held_tokens: int) -> float:
        """Bound the work of waves by the wave of the longest sequence, without overhead.

        It lasts as long as this sequence at its fastest degree; other work in it is limited by the tokens that fit.
        """
        longest, alone = int(self.lengths.argmax()), self.cost.compute_seconds(self.lengths)
        degrees = np.arange(int(self.fewest_degrees[longest]), self.cluster.ranks + 1)
        seconds = self.cost.ring_piece_seconds(np.full_like(degrees, self.lengths[longest]), degrees).min()
        densest = np.argsort(-alone / self.lengths)
        tokens, work = (np.concatenate(([0], np.cumsum(each[densest]))) for each in (self.lengths, alone))
        beside = min(self.cluster.ranks * seconds, np.interp(held_tokens, tokens, work))
        return float(seconds + (work[-1] - beside) / self.cluster.ranks * (1 - ROUNDING))

    @cached_property
    def packed_bound_seconds(self) -> float:
        """Seconds that plans with cut packs hardly beat; the other bounds do not hold for them."""
        if self.cost.fixed_seconds == 0:
            return self.bound_seconds
        return max(self.least_seconds(lone_rings=False), self._launches_seconds)

    @cached_property
    def _launches_seconds(self) -> float:
        return launches_makespan(self.lengths, self.cluster, self.cost, self.topology)
