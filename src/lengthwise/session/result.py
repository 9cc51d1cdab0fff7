"""What a session tells of a step."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, the same on all ranks.

    loss: of the global batch. router_loss: the routers' balance loss, which is not part of `loss`; None: the model has
    none. busy_seconds: of each rank, without what it waited for others; wait_seconds: of each, for transfers of rings.
    grad_norm: before clipping; None after `evaluate`.
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
        """Which part of the tokens is in sequences that several ranks share."""
        return self.plan.ring_tokens / self.num_tokens

    @property
    def idle_ratio(self) -> float:
        """Which part of all ranks' seconds of the step nobody computed in."""
        return max(0.0, 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.step_seconds))
