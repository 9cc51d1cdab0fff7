"""What a session returns of a step."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, the same on all ranks.

    Attributes:
        loss: of the global batch.
        plan: that of this step.
        num_sequences: sequences of the global batch.
        num_tokens: their tokens.
        num_loss_tokens: tokens with a loss.
        busy_seconds: of each rank, without waiting for other ranks.
        wait_seconds: of each rank, waiting for transfers of rings.
        step_seconds: from start to end of the step.
        plan_seconds: planning, which runs beside other work.
        grad_norm: before clipping; None after `evaluate`.
        router_loss: the routers' balance loss, which is not part of `loss`; None: the model has none.
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
        """Share of the tokens in sequences that several ranks share."""
        return self.plan.ring_tokens / self.num_tokens

    @property
    def idle_ratio(self) -> float:
        """Share of the step in which ranks waited, over all ranks."""
        return max(0.0, 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.step_seconds))
