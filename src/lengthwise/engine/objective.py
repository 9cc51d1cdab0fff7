"""The loss that the microbatches of a step minimize: a sum over their tokens, with one divisor for the whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from lengthwise.attention import PlannedAttention, to_device
from lengthwise.engine.batch import StepBatch
from lengthwise.models import LogitsAtOnce, model_loss
from lengthwise.program import Segment

CollectRouter: TypeAlias = Callable[[list[Tensor]], None]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A rank's part of a microbatch, and the model that runs it.

    input_ids, position_ids, shift_labels: (tokens,) each, of `segments` one after another. collect_router: callback for
    the router logits (see `model_loss`).
    """

    model: nn.Module
    planned: PlannedAttention
    segments: Sequence[Segment]
    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    collect_router: CollectRouter | None = None


class Objective(Protocol):
    """The loss of a rank's tokens in a microbatch; the sum over all ranks and microbatches is the step's loss.

    divisor: divisor of the sum, the same on all ranks. rows_beyond: padding rows that the model needs at least.
    """

    @property
    def divisor(self) -> float:
        """Divisor of the sum."""
        ...

    @property
    def rows_beyond(self) -> int:
        """Least number of padding rows."""
        ...

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Run the model; return the sum over the rank's tokens, in fp32 or wider."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """The cross entropy of the next token, by the weights of the batch."""

    batch: StepBatch
    divisor: float
    logits_at_once: LogitsAtOnce = "auto"
    rows_beyond: int = 0

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the summed loss of the tokens (see `model_loss`)."""
        weights = self.batch.weights(forward.segments)
        return model_loss(
            forward.model,
            forward.planned,
            forward.input_ids,
            forward.position_ids,
            forward.shift_labels,
            None if weights is None else to_device(weights, forward.input_ids.device),
            collect_router=forward.collect_router,
            logits_at_once=self.logits_at_once,
        )
