"""What is known of a step, an evaluation and a run when they are over, from the numbers of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lengthwise.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl. `loss` is the mean over the loss tokens of the global batch, before the update.

    `router_loss` is the routers' balance loss over the same batch, before its coefficient; None where there is none.
    `imbalance_ratio` is the largest over the mean busy time of the ranks, `idle_ratio` 1 - mean busy / step time,
    `ring_token_ratio` the share of tokens in sequences cut over more than one rank.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    num_microbatches: int
    step_seconds: float
    tokens_per_second: float
    imbalance_ratio: float
    idle_ratio: float
    ring_token_ratio: float
    plan_seconds: float
    router_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step that was run and its update made. `sequences`: those of the data, in the order of the plan's tokens."""

    metrics: StepMetrics
    num_steps: int
    sequences: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One line of eval.jsonl. `loss` is the mean over all loss tokens of the eval data after `step`."""

    step: int
    loss: float
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. `metrics`: of its last step. `stopped_by`: the signal that ended it early, or None."""

    steps: int
    num_tokens: int
    seconds: float
    first_loss: float
    metrics: StepMetrics
    parameters: int
    stopped_by: int | None
    folder: Path

    @property
    def last_loss(self) -> float:
        """The loss of the last step."""
        return self.metrics.loss


def step_metrics(
    plan: Plan,
    *,
    step: int,
    loss: float,
    grad_norm: float,
    lr: float,
    num_loss_tokens: int,
    busy_seconds: Sequence[float],
    step_seconds: float,
    plan_seconds: float,
    router_loss: float | None = None,
) -> StepMetrics:
    """Put a step's line together; `busy_seconds` has one entry a rank."""
    num_tokens = sum(plan.tokens)
    mean_busy = sum(busy_seconds) / len(busy_seconds)
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        num_sequences=len(plan.tokens),
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens,
        num_microbatches=len(plan.microbatches),
        step_seconds=step_seconds,
        tokens_per_second=num_tokens / step_seconds,
        imbalance_ratio=max(busy_seconds) / mean_busy,
        idle_ratio=max(0.0, 1 - mean_busy / step_seconds),
        ring_token_ratio=plan.ring_tokens / num_tokens,
        plan_seconds=plan_seconds,
        router_loss=router_loss,
    )
