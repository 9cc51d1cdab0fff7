"""What a loop may compute of a microbatch in place of the mean next-token loss.

A microbatch of a rank has parts of some sequences, cut and packed; every loss here is a sum over the tokens that are
there, so that it is exact under any cut. What is not (a mean, a collective, a statistic of the batch) is another loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.attention import to_device
from lengthwise.core.errors import ConfigError
from lengthwise.data import NO_LOSS
from lengthwise.engine.objective import ForwardPass, NextToken, Objective
from lengthwise.models.adapter import planned_output, run_planned
from lengthwise.session.loss_checks import SumCheck, one_number
from lengthwise.session.model import refuse_balance
from lengthwise.session.rows import RowBatch
from lengthwise.session.tokens import ComputeLoss, TokenLoss, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OfOutputs:
    """An `Objective` that a `TokenLoss` computes of the model's outputs. check: of the loss, where it is due."""

    batch: RowBatch
    loss: TokenLoss
    divisor: float
    check: SumCheck | None = None
    rows_beyond: int = 0

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the sum over the rank's tokens.

        Raises:
            ConfigError: the loss is no number that depends on the model.
        """
        output = planned_output(forward.model, forward.planned, forward.input_ids, forward.position_ids)
        if forward.collect_router is not None:
            forward.collect_router([logits.flatten(0, -2) for logits in output.router_logits])
        tokens = tokens_of(self.batch, forward)
        found = one_number("loss", self.loss(output, tokens), forward.input_ids.device)
        if self.check is not None and self.check.is_due:
            self.check.compare(self.loss, output, tokens, self.batch.tensors(forward.segments)[2].numpy())
        return found


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

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return this rank's part of the loss.

        Raises:
            ConfigError: it is no number that depends on the model.
        """
        assert forward.collect_router is None, "the session refuses models with a balance loss here"
        planned, device = forward.planned, forward.input_ids.device
        padding = planned.num_rows - planned.num_tokens

        def row(values: Tensor, left: int = 0, value: int = 0) -> Tensor:
            padded = F.pad(values.movedim(0, -1), (left, padding - left), value=value)
            return padded.movedim(-1, 0)[None]

        inputs = {
            "input_ids": row(forward.input_ids),
            "position_ids": row(forward.position_ids),
            "labels": row(forward.shift_labels, left=1, value=NO_LOSS),
            "use_cache": False,
            "lengthwise": planned,
            **{name: row(to_device(self.batch.column(name, forward.segments), device)) for name in self.batch.columns},
        }
        found = run_planned(forward.model, planned, lambda: self.compute_loss(self.model, inputs), once=False)
        return one_number("compute_loss", found, device)


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

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the objective's sum."""
        with torch.autocast(self.device.type, dtype=self.dtype):
            return self.inner(forward)


def objective_of(
    model: nn.Module,
    inner: nn.Module,
    batch: RowBatch,
    *,
    loss: TokenLoss | None,
    compute_loss: ComputeLoss | None,
    normalizer: float | None,
    check: SumCheck | None = None,
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
        return OfOutputs(batch=batch, loss=loss, divisor=divisor, check=check)
    return NextToken(batch=batch, divisor=divisor)


def tokens_of(batch: RowBatch, forward: ForwardPass) -> Tokens:
    """Return what a loss gets of a rank's part."""
    device, segments = forward.input_ids.device, forward.segments
    return Tokens(
        input_ids=forward.input_ids,
        position_ids=forward.position_ids,
        shift_labels=forward.shift_labels,
        sequences=to_device(batch.sequences(segments), device),
        columns={name: to_device(batch.column(name, segments), device) for name in batch.columns},
    )


def log_probabilities(output: Any, tokens: Tokens) -> Tensor:
    """Return the log-probability of each label, (tokens,), in fp32 or wider; 0 where there is none: a `TokenValues`."""
    logits = output.logits[0]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, tokens.shift_labels, ignore_index=NO_LOSS, reduction="none")
