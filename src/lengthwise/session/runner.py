"""Run a planned step to its end: microbatches, numbers of all ranks, reduced gradients, their norm.

Every rank enters a step's end after its last ring transfer. All collectives of a step are there: one gather of numbers,
the sums of the gradients, and the sum of their squared norms. Then the loop clips, and its optimizer updates and
publishes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lengthwise.checkpoint import SliceWriter
from lengthwise.comm import Transport, share_numbers
from lengthwise.core.errors import NumericError
from lengthwise.core.names import counted
from lengthwise.core.plan import Plan
from lengthwise.cost import is_mostly_overhead
from lengthwise.engine.norm import reduce_gradients
from lengthwise.engine.objective import Objective
from lengthwise.engine.shortage import reporting_update
from lengthwise.engine.step import RankResult
from lengthwise.models import has_balance_loss
from lengthwise.planner.prefixes import saved_ratio
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.report.figures import seconds
from lengthwise.session.engine import Engine
from lengthwise.session.loss_checks import LossCheck
from lengthwise.session.source import PlannedStep

Numbers = TypeVar("Numbers", bound=RankResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of a step, the same on all ranks.

    Attributes:
        loss: loss of the global batch.
        plan: plan of the step.
        num_sequences: sequences of the global batch.
        num_tokens: tokens of the global batch; prefixes that rows share count for every row.
        num_loss_tokens: tokens with a loss.
        busy_seconds: seconds of each rank without waiting for other ranks.
        wait_seconds: seconds that each rank waited for ring transfers.
        step_seconds: seconds from start to end of the step.
        plan_seconds: seconds of planning, which runs beside other work.
        grad_norm: norm of the gradient before clipping, or None after `evaluate`.
        router_loss: the routers' balance loss, which is not part of `loss`, or None if the model has none.
    """

    loss: float
    plan: Plan
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    busy_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    step_seconds: float
    plan_seconds: float
    grad_norm: float | None = None
    router_loss: float | None = None

    @property
    def ring_token_ratio(self) -> float:
        """Share of the tokens that are in rings: in sequences that several ranks share."""
        return self.plan.ring_tokens / sum(self.plan.tokens)

    @property
    def imbalance_ratio(self) -> float:
        """Longest over mean busy time of the ranks."""
        mean = sum(self.busy_seconds) / len(self.busy_seconds)
        return max(self.busy_seconds) / mean if mean else 1.0

    @property
    def idle_ratio(self) -> float:
        """Share of the step in which ranks waited, over all ranks."""
        return max(0.0, 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.step_seconds))


class StepEnd:
    """A loop's decisions at a step's end, the same on all ranks. This one refuses values that are not finite."""

    def numbers(self, step: int, own: RankResult) -> RankResult:
        """Return this rank's numbers of a step, which all ranks get; a subclass may add its own."""
        del step
        return own

    def receive(self, step: int, ranks: Sequence[Any]) -> None:
        """Receive the numbers of all ranks."""

    def accepts(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        """Return whether the step may go on to its update: whether a value of it is finite."""
        del sequences
        refuse_not_finite(f"step {step}, {what}", value)
        return True


@dataclass(kw_only=True)
class StepRunner:
    """Runs the steps of a loop.

    end: the loop's decisions at a step's end. steps: number of steps made so far. grad_norm: norm of the last step's
    gradient, before clipping. writer: writer of states beside the steps.
    """

    engine: Engine
    writer: SliceWriter
    end: StepEnd = field(default_factory=StepEnd)
    steps: int = 0
    grad_norm: float | None = None

    def backward(
        self,
        planned: PlannedStep,
        objective: Objective | None = None,
        *,
        name: str | None = None,
        before: RankResult | None = None,
        loss: float | None = None,
        check: LossCheck | None = None,
    ) -> StepResult:
        """Run a step forward and backward, and reduce its gradients. Collective.

        objective: by default the next token's loss. name: the step's name in messages. before: numbers of this rank's
        earlier pass for the step. loss: the step's loss, if the objective computes another number. check: check of the
        loop's loss.

        Returns:
            The step, without `grad_norm` if `end` skips its update.
        """
        self.steps, self.grad_norm, ids = self.steps + 1, None, planned.batch.ids
        step, parameters, transport = self.steps, self.engine.parameters, self.engine.transport
        assert parameters is not None, "only sessions that train run backward"
        name, how = name or f"step {step}", {"before": before, "loss": loss, "check": check}
        ranks, result = self._run(planned, objective, name, train=True, **how)
        self.writer.settle([rank.saving for rank in ranks])
        self.end.receive(step, ranks)
        balance = result.router_loss or 0.0
        if self.end.accepts(step, "loss", result.loss, ids) and self.end.accepts(step, "router loss", balance, ids):
            with reporting_update(transport):
                norm = reduce_gradients(parameters, transport)
            self.grad_norm = norm if self.end.accepts(step, "norm of the gradient", norm, ids) else None
        self._finish(check, name)
        return replace(result, grad_norm=self.grad_norm)

    def evaluate(
        self, planned: PlannedStep, objective: Objective | None = None, check: LossCheck | None = None
    ) -> StepResult:
        """Return the loss of sequences, without gradients and dropout. Collective."""
        name = f"evaluation after step {self.steps}"
        _, result = self._run(planned, objective, name, train=False, check=check)
        self._finish(check, name)
        return result

    def _finish(self, check: LossCheck | None, name: str) -> None:
        if check is not None:
            check.finish(partial(self.engine.summed_loss, f"{name}, check of the loss", step=self.steps))

    def _run(
        self,
        planned: PlannedStep,
        objective: Objective | None,
        name: str,
        *,
        train: bool,
        before: RankResult | None = None,
        loss: float | None = None,
        check: LossCheck | None = None,
    ) -> tuple[list[RankResult], StepResult]:
        """Run the microbatches and share the numbers of all ranks, in fp64. Collective."""
        engine, batch, start = self.engine, planned.batch, time.perf_counter()
        objective = objective or engine.next_token(batch)
        own = engine.run(planned, name, step=self.steps, train=train, objective=objective)
        if before is not None:
            busy, waited = before.busy_seconds, before.ring_wait_seconds
            seconds = {"busy_seconds": busy + own.busy_seconds, "ring_wait_seconds": waited + own.ring_wait_seconds}
            own = replace(own, **seconds)
        if check is not None:
            own = replace(own, loss_check=check.number)
        own = replace(own, saving=self.writer.progress)
        engine.transport.phase = f"{name}, step end"
        ranks = share_record(engine.transport, self.end.numbers(self.steps, own) if train else own)
        if check is not None:
            check.take([rank.loss_check for rank in ranks])
        return ranks, StepResult(
            loss=sum(rank.loss_sum for rank in ranks) / objective.divisor if loss is None else loss,
            plan=planned.plan,
            num_sequences=len(batch.ids),
            num_tokens=sum(batch.lengths),
            num_loss_tokens=batch.loss_tokens,
            busy_seconds=tuple(rank.busy_seconds for rank in ranks),
            wait_seconds=tuple(rank.ring_wait_seconds for rank in ranks),
            step_seconds=time.perf_counter() - start,
            plan_seconds=planned.plan_seconds,
            router_loss=sum(rank.router_loss for rank in ranks) if has_balance_loss(engine.config) else None,
        )


def share_record(transport: Transport, own: Numbers) -> list[Numbers]:
    """Return a record of numbers of each rank, in the order of the ranks. Collective."""
    rows = share_numbers(transport, [float(value) for value in astuple(own)]).tolist()
    return [type(own)(**dict(zip(own.__dataclass_fields__, row, strict=True))) for row in rows]


def refuse_not_finite(where: str, value: float) -> None:
    """Refuse a value that is NaN or infinite."""
    if not math.isfinite(value):
        remedy = "Look at the step's sequences and the learning rate; no update was made."
        raise NumericError(where, expected="a finite number", got=f"{value}", remedy=remedy)


def first_step_sentence(step: StepResult, planning: StepPlanning, *, on_gpus: bool) -> str:
    """Describe the plan of the first step, without predictions where overhead decides."""
    plan = step.plan
    held = " or ".join(f"{tokens:,}" for tokens in sorted(set(planning.capacities.values())))
    predicted = float(plan.notes["predicted_seconds"])
    said = f"lengthwise: a rank holds {held} tokens; step 1 on {counted(plan.ranks, 'rank')}: "
    said += f"{step.ring_token_ratio:.0%} of tokens in rings"
    is_timed = not is_mostly_overhead(predicted, on_gpus=on_gpus)
    said += f", {step.idle_ratio:.0%} idle" * is_timed
    expected = f"predicted {seconds(predicted)} (forward and backward only)"
    expected = expected if is_timed else "mostly overhead with so little work"
    took = f"took {seconds(step.step_seconds)}, {expected}"
    balance = "; the routers' balance loss is that of all tokens of the step, not a mean of microbatches"
    balance = "" if step.router_loss is None else balance
    return f"{said}, {took}{_shared_sentence(step, is_timed=is_timed)}{balance}"


def _shared_sentence(step: StepResult, *, is_timed: bool) -> str:
    """Describe the savings by shared prefixes, if there are any. is_timed: True if predicted times mean something."""
    took = saved_ratio(step.plan)
    if not step.plan.parents or took is None:
        return ""
    tokens = 1 - sum(step.plan.tokens) / step.num_tokens
    time = f", {took:.0%} less time predicted" * is_timed
    return f"; prompts that rows share are computed once: {tokens:.0%} fewer tokens{time}"
