"""What a loop may compute of a microbatch in place of the mean next-token loss.

A microbatch of a rank has parts of some sequences, cut and packed; every loss here is a sum over the tokens that are
there, so that it is exact under any cut. What is not (a mean, a collective, a statistic of the batch) is another loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.attention import PlannedAttention, to_device
from lengthwise.core.errors import ConfigError
from lengthwise.data import NO_LOSS
from lengthwise.engine.objective import HearRouter, NextToken, Objective
from lengthwise.models.adapter import planned_output, run_planned
from lengthwise.program import Segment
from lengthwise.session.model import refuse_balance
from lengthwise.session.rows import RowBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """This rank's tokens of a microbatch, all (tokens,), in the order of the model's outputs.

    shift_labels: what the model should say after each, -100 where it has no loss. sequences: which of the step's rows
    each is of. columns: the rows' other columns, (tokens, ...) each.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    sequences: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)


TokenLoss: TypeAlias = Callable[[Any, Tokens], Tensor]
"""Takes the model's outputs, `logits` (1, tokens, vocabulary) among them, and `Tokens`; returns a sum over them."""
ComputeLoss: TypeAlias = Callable[[nn.Module, dict[str, Any]], Tensor]
"""Takes a model and what it is called with, as Trainer's `compute_loss` does; returns its share of the step's loss."""
TokenValues: TypeAlias = Callable[[Any, Tokens], Tensor]
"""Takes outputs and tokens as `TokenLoss` does; returns one value a token, (tokens,), or several, (tokens, k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfOutputs:
    """An `Objective` that a `TokenLoss` computes of the model's outputs."""

    batch: RowBatch
    loss: TokenLoss
    divisor: float
    rows_beyond: int = 0

    def __call__(
        self,
        model: nn.Module,
        planned: PlannedAttention,
        segments: Sequence[Segment],
        tensors: Sequence[Tensor],
        hear_router: HearRouter | None,
    ) -> Tensor:
        """Return the sum over the rank's tokens."""
        input_ids, position_ids, shift_labels = tensors
        output = planned_output(model, planned, input_ids, position_ids)
        if hear_router is not None:
            hear_router([logits.flatten(0, -2) for logits in output.router_logits])
        return self.loss(output, tokens_of(self.batch, segments, input_ids, position_ids, shift_labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfModel:
    """An `Objective` that a function of model and inputs computes, labels and model shifting by themselves.

    `model` is what the function is given; a planned forward of any of its parts is counted. The row has one token of
    padding more than tokens, and labels are one to the right: whoever then shifts them pairs each token with what
    follows it in its sequence, however it was cut and packed.
    """

    batch: RowBatch
    compute_loss: ComputeLoss
    model: nn.Module
    normalizer: float
    divisor: float = 1.0
    rows_beyond: int = 1

    def __call__(
        self,
        model: nn.Module,
        planned: PlannedAttention,
        segments: Sequence[Segment],
        tensors: Sequence[Tensor],
        hear_router: HearRouter | None,
    ) -> Tensor:
        """Return this rank's part of the loss."""
        assert hear_router is None, "the session refuses models with a balance loss here"
        input_ids, position_ids, shift_labels = tensors
        padding = planned.num_rows - planned.num_tokens

        def row(values: Tensor, left: int = 0, value: int = 0) -> Tensor:
            padded = F.pad(values.movedim(0, -1), (left, padding - left), value=value)
            return padded.movedim(-1, 0)[None]

        inputs = {
            "input_ids": row(input_ids),
            "position_ids": row(position_ids),
            "labels": row(shift_labels, left=1, value=NO_LOSS),
            "use_cache": False,
            "lengthwise": planned,
            **{
                name: row(to_device(self.batch.column(name, segments), input_ids.device)) for name in self.batch.columns
            },
        }
        return run_planned(model, planned, lambda: self.compute_loss(self.model, inputs), once=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocasting:
    """An `Objective` whose forward runs under torch.autocast; its backward does not."""

    inner: Objective
    device: torch.device
    dtype: torch.dtype

    @property
    def divisor(self) -> float:
        """That of the objective."""
        return self.inner.divisor

    @property
    def rows_beyond(self) -> int:
        """Those of the objective."""
        return self.inner.rows_beyond

    def __call__(
        self,
        model: nn.Module,
        planned: PlannedAttention,
        segments: Sequence[Segment],
        tensors: Sequence[Tensor],
        hear_router: HearRouter | None,
    ) -> Tensor:
        """Return the objective's sum."""
        with torch.autocast(self.device.type, dtype=self.dtype):
            return self.inner(model, planned, segments, tensors, hear_router)


def objective_of(
    model: nn.Module,
    inner: nn.Module,
    batch: RowBatch,
    *,
    loss: TokenLoss | None,
    compute_loss: ComputeLoss | None,
    normalizer: float | None,
) -> Objective:
    """Return what a step minimizes: one of the losses, or the next token's. `inner`: the model in peft's wrap.

    Raises:
        ConfigError: two losses, or nothing to divide by.
        ModelRefused: a balance loss that `compute_loss` would not count right.
    """
    if loss is not None and compute_loss is not None:
        raise ConfigError("loss", expected="loss or compute_loss", got="both", remedy="Leave one out.")
    divisor = batch.loss_weight if normalizer is None else normalizer
    if not divisor > 0 or not math.isfinite(divisor):
        expected = "a token with a label in the step" if normalizer is None else "a finite normalizer above 0"
        remedy = "Give normalizer, or other sequences."
        raise ConfigError("normalizer", expected=expected, got=f"{divisor:g}", remedy=remedy)
    if compute_loss is not None:
        refuse_balance(inner, "compute_loss")
        return OfModel(batch=batch, compute_loss=compute_loss, model=model, normalizer=divisor)
    if loss is not None:
        return OfOutputs(batch=batch, loss=loss, divisor=divisor)
    return NextToken(batch=batch, divisor=divisor)


def tokens_of(
    batch: RowBatch, segments: Sequence[Segment], input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor
) -> Tokens:
    """Return what a loss is told of a rank's segments."""
    device = input_ids.device
    return Tokens(
        input_ids=input_ids,
        position_ids=position_ids,
        shift_labels=shift_labels,
        sequences=to_device(batch.sequences(segments), device),
        columns={name: to_device(batch.column(name, segments), device) for name in batch.columns},
    )


def log_probabilities(output: Any, tokens: Tokens) -> Tensor:
    """Return the log-probability of each label, (tokens,), in fp32 or wider; 0 where there is none: a `TokenValues`."""
    logits = output.logits[0]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, tokens.shift_labels, ignore_index=NO_LOSS, reduction="none")
