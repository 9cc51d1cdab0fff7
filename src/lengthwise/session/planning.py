"""What plans the steps of a session, by what its losses make: logits in chunks, or all of a microbatch at once.

Which losses will come is not known when memory is measured, so both are. Of whole logits a rank holds fewer tokens: a
step that was planned ahead for chunks is planned again where such a loss comes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Plan
from lengthwise.cost import STEP_TOKENS
from lengthwise.engine.batch import StepBatch
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.engine import Engine
from lengthwise.session.source import PlannedStep, StepPlanner


def _as_it_is(planning: StepPlanning) -> StepPlanning:
    return planning


_WHOLE = {"logits": "whole"}  # a note of plans


@dataclass(kw_only=True)
class SessionPlanning:
    """Planning for losses that make logits in chunks, and for those over whole logits; of a given capacity the same.

    expects_whole: which of them plans steps ahead. process: of rank 0, once it is there. priced: returns a planning
    with what was measured of costs and ranks since.
    """

    chunked: StepPlanning
    whole: StepPlanning
    expects_whole: bool = False
    process: PlannerProcess | None = None
    priced: Callable[[StepPlanning], StepPlanning] = _as_it_is

    def start(self, process: PlannerProcess) -> StepPlanner:
        """Plan with a process from now on; return what plans steps ahead, for the losses that are expected by then."""
        self.process = process
        return lambda lengths: process.plan(self.priced(self.ahead), lengths)

    def plan(self, engine: Engine, batch: StepBatch, name: str, *, whole: bool) -> PlannedStep:
        """Return a batch with its plan for such a loss. Collective. name: of the step, in words.

        Raises:
            MemoryShortage: of whole logits not even 128 tokens fit.
        """
        planning = self.of(whole=whole)
        return engine.planned(batch, name, self.process and partial(self.process.plan, planning))

    @property
    def ahead(self) -> StepPlanning:
        """That of steps planned ahead."""
        return self.of(whole=self.expects_whole)

    def of(self, *, whole: bool) -> StepPlanning:
        """Return that of a loss over whole logits, or of one in chunks.

        Raises:
            MemoryShortage: of whole logits not even 128 tokens fit.
        """
        if whole and not self.whole.capacities:
            expected = f"room for all logits of {STEP_TOKENS} tokens, which loss, compute_loss and values have"
            remedy = "Leave them out (the session's own losses make logits in chunks), or use more ranks or memory."
            raise MemoryShortage("loss", expected=expected, got="less, as measured at the start", remedy=remedy)
        return self.whole if whole else self.chunked

    def suits(self, plan: Plan, *, whole: bool) -> bool:
        """Return whether a plan is one of this session's ranks, and fits into memory with such a loss.

        One in stages is of fewer ranks, and no plan of a session whose ranks have whole models.
        """
        return plan.ranks == self.chunked.ranks and (not whole or self.whole.notes.items() <= plan.notes.items())


def for_whole_logits(planning: StepPlanning, held: Capacities) -> StepPlanning:
    """Return the planning of a session by what a rank holds of whole logits; none of it may be asked to plan."""
    if planning.measured is None:  # evaluates alone
        held_tokens = {"none": max(held.plain.values())} if held.plain else {}
        return replace(planning, capacities=held_tokens, notes=_WHOLE)
    return replace(planning, capacities=dict(held.plain), measured=held, notes=_WHOLE)
