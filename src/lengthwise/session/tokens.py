"""What functions of a loop get of a microbatch, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """This rank's tokens of a microbatch, all (tokens,), in the order of the model's outputs.

    shift_labels: what the model should say after each, -100 where it has no loss. sequences: which of the step's rows
    each is of. columns: the rows' other columns, (tokens, ...) each. is_check: the call only checks, on some of the
    tokens, that the loss is a sum; numbers that a loop counts for itself leave it out.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    sequences: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    is_check: bool = False

    def part(self, part: Tensor) -> Tokens:
        """Return the tokens of these numbers, for a check."""
        return Tokens(
            input_ids=self.input_ids[part],
            position_ids=self.position_ids[part],
            shift_labels=self.shift_labels[part],
            sequences=self.sequences[part],
            columns={name: values[part] for name, values in self.columns.items()},
            is_check=True,
        )


TokenLoss: TypeAlias = Callable[[Any, Tokens], Tensor]
"""Takes the model's outputs, `logits` (1, tokens, vocabulary) among them, and `Tokens`; returns a sum over them."""
ComputeLoss: TypeAlias = Callable[[nn.Module, dict[str, Any]], Tensor]
"""Takes a model and what it is called with, as Trainer's `compute_loss` does; returns its share of the step's loss."""
TokenValues: TypeAlias = Callable[[Any, Tokens], Tensor]
"""Takes outputs and tokens as `TokenLoss` does; returns one value per token, (tokens,), or several, (tokens, k)."""
