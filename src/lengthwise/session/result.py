"""What a session tells of a step."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, the same on all ranks.

    loss: of the global batch. router_loss: the routers' balance loss, which is not part of `loss`; None: the model has
    none. busy_seconds: of each rank, in which it did not wait for others. grad_norm: before clipping; None after
    `evaluate`.
    """

    loss: float
    plan: Plan
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    busy_seconds: tuple[float, ...]
    step_seconds: float
    plan_seconds: float
    grad_norm: float | None = None
    router_loss: float | None = None
