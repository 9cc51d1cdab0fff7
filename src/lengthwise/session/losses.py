"""What a loop may compute of a microbatch in place of the mean next-token loss.

A microbatch of a rank has parts of some sequences, cut and packed; every loss here is a sum over the tokens that are
there, so that it is exact under any cut. What is not (a mean, a collective, a statistic of the batch) is another loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.attention import to_device
from lengthwise.core.errors import ConfigError
from lengthwise.data import NO_LOSS
from lengthwise.engine.objective import ForwardPass
from lengthwise.models import token_losses
from lengthwise.models.adapter import planned_output, run_planned
from lengthwise.session.misuse import shown
from lengthwise.session.rows import RowBatch


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
CheckLoss: TypeAlias = Callable[[TokenLoss, Any, Tokens, Callable[[], Tensor]], None]
"""Checks a `TokenLoss` where that is due, by outputs, tokens, and what returns their labels on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfOutputs:
    """An `Objective` that a `TokenLoss` computes of the model's outputs."""

    batch: RowBatch
    loss: TokenLoss
    divisor: float
    check: CheckLoss | None = None
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
        if self.check is not None:
            self.check(self.loss, output, tokens, lambda: self.batch.tensors(forward.segments)[2])
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
    """Return the log-probability of each label, (tokens,), in fp32 or wider; 0 where there is none: a `TokenValues`.

    For use beside other values: alone they are what `values=None` is, without logits of all tokens at once.
    """
    return -token_losses(output.logits[0], tokens.shift_labels)


_IN_GRAPH = "Return the sum over the tokens, in the graph of the outputs: no .item(), .detach() or torch.no_grad()."


def one_number(
    what: str, found: object, device: torch.device, *, of: str = "the model's outputs", remedy: str = _IN_GRAPH
) -> Tensor:
    """Return what a function of the loop's gave as a tensor (), on the device.

    Raises:
        ConfigError: it is none, or has no gradient where one is asked for.
    """
    got = None  # what is shown of a tensor waits for the device
    if isinstance(found, Tensor):
        needs = torch.is_grad_enabled() and not found.requires_grad
        if found.numel() == 1 and found.is_floating_point() and not found.is_meta and not needs:
            return found.reshape(()).to(device)
        got = f"{str(found.dtype).removeprefix('torch.')} of {tuple(found.shape)}"
        got += " on the meta device" if found.is_meta else f", which does not depend on {of}" if needs else ""
    raise ConfigError(
        what, expected=f"a tensor of one number, computed of {of}", got=got or shown(found), remedy=remedy
    )
