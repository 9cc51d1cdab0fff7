"""The numbers that the ranks of a run share at a step's end, and what is reported of the step by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.engine.memory import PeakMemory
from lengthwise.engine.step import RankResult
from lengthwise.run.metrics import StepMetrics
from lengthwise.run.setup import RankRun
from lengthwise.session.numbers import StepNumbers
from lengthwise.session.source import PlannedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers(StepNumbers):
    """What a rank shares of a step and of what goes on beside it; see `FinitePolicy`, `Checkpoints`."""

    offload_wait_seconds: float
    offloaded_bytes: float
    peak_bytes: float
    largest: float
    checkpoint_progress: float
    asks_for_checkpoint: float


def numbers_of(rank: RankRun, work: RankResult, memory: PeakMemory) -> RunNumbers:
    """Return the numbers of this rank."""
    return RunNumbers(
        loss_sum=work.loss_sum,
        router_loss=work.router_loss,
        busy_seconds=work.busy_seconds,
        ring_wait_seconds=work.ring_wait_seconds,
        offload_wait_seconds=work.offload_wait_seconds,
        offloaded_bytes=work.offloaded_bytes,
        peak_bytes=memory.peak_bytes(),
        largest=rank.finite.largest,
        checkpoint_progress=rank.checkpoints.progress,
        asks_for_checkpoint=rank.checkpoints.asks,
    )


def metrics_of(
    planned: PlannedStep,
    ranks: Sequence[RunNumbers],
    *,
    step: int,
    grad_norm: float,
    lr: float,
    step_seconds: float,
    predicted_seconds: float,
    has_balance_loss: bool,
) -> StepMetrics:
    """Return what is reported of a step that made its update."""
    return StepMetrics(
        plan=planned.plan,
        step=step,
        loss=sum(each.loss_sum for each in ranks) / planned.batch.loss_weight,
        router_loss=sum(each.router_loss for each in ranks) if has_balance_loss else None,
        grad_norm=grad_norm,
        lr=lr,
        num_loss_tokens=planned.batch.loss_tokens,
        busy_seconds=tuple(each.busy_seconds for each in ranks),
        step_seconds=step_seconds,
        plan_seconds=planned.plan_seconds,
        predicted_step_seconds=predicted_seconds,
        exposed_ring_seconds=max(each.ring_wait_seconds for each in ranks),
        offload_wait_seconds=max(each.offload_wait_seconds for each in ranks),
        offloaded_bytes=int(sum(each.offloaded_bytes for each in ranks)),
        peak_memory_bytes=int(max(each.peak_bytes for each in ranks)),
    )
