"""Planning of a session's steps for two kinds of losses: those that make logits in chunks, and those over whole logits.

The coming losses are unknown when memory is measured, so both are measured. With whole logits fewer tokens fit: a step
that was planned ahead for chunks is planned again if its loss then needs whole logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Plan
from lengthwise.cost import STEP_TOKENS, Cost
from lengthwise.cost.rank_speeds import RanStep
from lengthwise.engine.batch import StepBatch
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.planner.service.slow_ranks import SlowRanks
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.engine import Engine
from lengthwise.session.losses import IN_CHUNKS, LossKind
from lengthwise.session.source import PlannedStep, StepPlanner

_WHOLE = {"logits": "whole"}  # a note of plans


@dataclass(kw_only=True)
class SessionPlanning:
    """Planning for losses in chunks, and for losses over whole logits; both are the same under a given capacity.

    expects: loss for which steps are planned ahead. shares: True if rows may share prefixes without labels, as long as
    the loop sets no dropout or balance loss. allows: True if all ranks found at the last step that it has set none.
    process: the planner's process, on rank 0. slow_ranks: observer of the ranks' speeds, None without measured costs.
    """

    chunked: StepPlanning
    whole: StepPlanning
    expects: LossKind = IN_CHUNKS
    shares: bool = False
    allows: bool = True
    process: PlannerProcess | None = None
    slow_ranks: SlowRanks | None = None

    def start(self, process: PlannerProcess) -> StepPlanner:
        """Plan with a process from now on; return a function that plans a step ahead for the expected losses."""
        self.process = process
        return lambda batch: self._plan(process, self.ahead, batch, self.expects)

    def reprice(self, cost: Cost) -> None:
        """Plan later steps by newly measured costs, and follow the speeds of ranks."""
        self.chunked, self.whole = (replace(each, cost=cost) for each in (self.chunked, self.whole))
        self.slow_ranks = SlowRanks()

    def observe(self, step: RanStep) -> str | None:
        """Note a finished step; return a note the first time that ranks differ in speed."""
        return None if self.slow_ranks is None else self.slow_ranks.observe(self.chunked, step)

    def predicted_step_seconds(self, plan: Plan) -> float:
        """Return a step's seconds by the costs of its plan."""
        return float(plan.notes["predicted_seconds"]) + self.chunked.cost.step_end_seconds(self.chunked.ranks)

    def plan(self, engine: Engine, batch: StepBatch, name: str, loss: LossKind) -> PlannedStep:
        """Plan a batch for a loss. Collective. name: the step's name in messages."""
        planning, process = self.of(loss), self.process
        return engine.planned(batch, name, process and (lambda batch: self._plan(process, planning, batch, loss)))

    def _plan(
        self, process: PlannerProcess, planning: StepPlanning, batch: StepBatch, loss: LossKind
    ) -> tuple[str, float]:
        prefixes = batch.shared_prefixes() if self._may_share(loss) else None
        if self.slow_ranks is not None:
            planning = self.slow_ranks.planned_for(planning)
        return process.plan(planning, batch.lengths, prefixes, batch.image_work())

    def _may_share(self, loss: LossKind) -> bool:
        return self.shares and self.allows and loss.labels_alone

    @property
    def ahead(self) -> StepPlanning:
        """The planning of steps planned ahead."""
        return self.of(self.expects)

    def of(self, loss: LossKind) -> StepPlanning:
        """Return the planning for losses over whole logits, or for losses in chunks.

        Raises:
            MemoryShortage: whole logits of 128 tokens do not fit.
        """
        if loss.whole_logits and not self.whole.capacities:
            expected = f"room for all logits of {STEP_TOKENS} tokens, which loss, compute_loss and values need"
            remedy = "Use the session's own losses, which make logits in chunks, or more ranks or memory."
            raise MemoryShortage("loss", expected=expected, got="less, as measured at the start", remedy=remedy)
        return self.whole if loss.whole_logits else self.chunked

    def suits(self, plan: Plan, loss: LossKind) -> bool:
        """Return whether a plan is for these ranks, fits into memory with the loss, and shares only if it may."""
        fits = not loss.whole_logits or self.whole.notes.items() <= plan.notes.items()
        shares = self._may_share(loss) or not plan.parents
        return plan.ranks == self.chunked.ranks and fits and shares


def for_whole_logits(planning: StepPlanning, held: Capacities) -> StepPlanning:
    """Return the planning for losses over whole logits, with the capacities `held`, which may be empty."""
    if planning.measured is None:  # evaluates alone
        held_tokens = {"none": max(held.plain.values())} if held.plain else {}
        return replace(planning, capacities=held_tokens, notes=_WHOLE)
    return replace(planning, capacities=dict(held.plain), measured=held, notes=_WHOLE)
