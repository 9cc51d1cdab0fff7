"""Losses that are not sums over tokens (DPO, GRPO, a distillation over whole sequences), exact under any cut.

1. All microbatches run forward without gradients; their values, of tokens or sequences, are summed over the ranks.
2. Every rank computes the loss from these values, and the loss's gradient by each value.
3. All microbatches run forward and backward, with each token's value weighted by its gradient (the chain rule).

Costs one more forward pass, and four bytes a token and value on every rank. Log-probabilities of labels need logits in
chunks only; a loop's own function gets all logits of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lengthwise.attention import to_device
from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.engine.objective import ForwardPass
from lengthwise.engine.step import RankResult
from lengthwise.models import has_dropout, model_log_probabilities, model_loss
from lengthwise.models.adapter import planned_output
from lengthwise.session.engine import Engine
from lengthwise.session.losses import Tokens, TokenValues, gradients_by, one_number, tokens_of
from lengthwise.session.misuse import shown
from lengthwise.session.row_batch import RowBatch, rows_of
from lengthwise.session.source import PlannedStep

Per: TypeAlias = Literal["sequence", "token"]
Combine: TypeAlias = Callable[[Tensor], Tensor] | Callable[[list[Tensor]], Tensor]
"""Returns the loss, (), from the sums of all sequences, (sequences, ...), or from a list of (length, ...) per token."""


@dataclass(slots=True)
class Gathered:
    """Values of all tokens of a step, or their sums by sequence: (slots, ...), in fp32 or wider."""

    batch: RowBatch
    per: Per
    dtype: torch.dtype
    device: torch.device
    sums: Tensor | None = None
    offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = to_device(torch.tensor([0, *accumulate(self.batch.lengths)]), self.device)

    @property
    def num_slots(self) -> int:
        """Number of tokens or sequences."""
        return len(self.batch.lengths) if self.per == "sequence" else sum(self.batch.lengths)

    def slots(self, tokens: Tokens) -> Tensor:
        """Return the slot of each token, (tokens,)."""
        if self.per == "sequence":
            return tokens.sequences
        return self.offsets[tokens.sequences] + tokens.position_ids

    def add(self, tokens: Tokens, values: Tensor) -> None:
        """Add the values of a microbatch's tokens."""
        if self.sums is None:
            self.sums = torch.zeros(self.num_slots, *values.shape[1:], dtype=self.dtype, device=self.device)
        self.sums.index_add_(0, self.slots(tokens), values.detach().to(self.dtype))

    def handed_on(self, leaf: Tensor) -> Tensor | list[Tensor]:
        """Return a tensor (slots, ...) as `Combine` takes it."""
        return leaf if self.per == "sequence" else list(leaf.split(list(self.batch.lengths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesOfTokens:
    """An `Objective` over values of tokens: it gathers them if `weights` is None, else it sums them by weight.

    values: function of values; None for the log-probability of a token's label (0 without a label), with logits_at_once
    logits per chunk. weights: the loss's gradient by each slot, (slots, ...).
    """

    gathered: Gathered
    values: TokenValues | None
    logits_at_once: int | None
    weights: Tensor | None = None
    divisor: float = 1.0
    rows_beyond: int = 0

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the weighted sum over the rank's tokens, or 0 while they are gathered."""
        assert forward.collect_router is None, "the session refuses models with a balance loss here"
        tokens = tokens_of(self.gathered.batch, forward)
        if self.values is None:
            return self._of_labels(forward, tokens)
        return self._of_outputs(forward, tokens, self.values)

    def _of_labels(self, forward: ForwardPass, tokens: Tokens) -> Tensor:
        given = (forward.model, forward.planned, forward.input_ids, forward.position_ids, forward.shift_labels)
        if self.weights is None:
            return self._gather(tokens, model_log_probabilities(*given, logits_at_once=self.logits_at_once))
        weights = self.weights[self.gathered.slots(tokens)]
        return model_loss(*given, -weights, logits_at_once=self.logits_at_once)

    def _of_outputs(self, forward: ForwardPass, tokens: Tokens, of_outputs: TokenValues) -> Tensor:
        input_ids = forward.input_ids
        values = of_outputs(planned_output(forward.model, forward.planned, input_ids, forward.position_ids), tokens)
        is_one = isinstance(values, Tensor) and not values.is_meta and not values.is_complex()
        needs = self.weights is not None and is_one and not values.requires_grad
        if not is_one or needs or not values.dim() or len(values) != len(input_ids):
            expected = f"one value per token, ({len(input_ids)},) or ({len(input_ids)}, k)"
            remedy = "Return one value per token, not their sum; `combine` sums them."
            got = f"{shown(values)}{', without a gradient' * needs}"
            raise ConfigError("values", expected=expected, got=got, remedy=remedy)
        if self.weights is None:
            return self._gather(tokens, values)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return (wide * self.weights[self.gathered.slots(tokens)].to(wide.dtype)).sum()

    def _gather(self, tokens: Tokens, values: Tensor) -> Tensor:
        self.gathered.add(tokens, values)
        return torch.zeros((), dtype=self.gathered.dtype, device=values.device)


def refuse_dropout(model: nn.Module) -> None:
    """Refuse a model with dropout, whose two passes would differ."""
    if has_dropout(model) and model.training:
        remedy = "Set the model's dropout to 0."
        raise ModelRefused("dropout", expected="0, because the model runs twice", got="more", remedy=remedy)


def gather(
    engine: Engine, planned: PlannedStep, values: TokenValues | None, per: Per, name: str, *, step: int
) -> tuple[ValuesOfTokens, Tensor, RankResult]:
    """Run the microbatches forward, and sum the values of their tokens over the ranks. Collective.

    Returns:
        The objective that gathered them, the sums, and this rank's numbers of the pass.
    """
    wide = torch.promote_types(engine.dtype, torch.float32)
    gathered = Gathered(rows_of(planned), per, wide, engine.device)
    objective = ValuesOfTokens(gathered=gathered, values=values, logits_at_once=engine.logits_at_once)
    work = engine.run(planned, name, step=step, train=False, objective=objective)
    engine.transport.phase = f"{name}, sum of the values"
    widths = engine.each_rank(-1.0 if gathered.sums is None else float(gathered.sums[:1].numel()))
    if gathered.sums is None:  # no microbatch here: take the others' width
        shape = (int(max(widths)),) if max(widths) > 1 else ()
        gathered.sums = torch.zeros(gathered.num_slots, *shape, dtype=wide, device=engine.device)
    engine.transport.all_reduce(gathered.sums)
    return objective, gathered.sums, work


def combined(gathered: Gathered, sums: Tensor, combine: Combine, model: nn.Module) -> tuple[float, Tensor]:
    """Return the loss that `combine` computes from the sums, and its gradient by each of them.

    Raises:
        ConfigError: `combine` returns no single number, or one that does not depend on the sums, or not on them alone.
    """
    leaf = sums.detach().requires_grad_()
    with torch.enable_grad():
        loss = combine(gathered.handed_on(leaf))  # type: ignore[arg-type] - which of the two, `per` says
        remedy = "Return the mean or sum over sequences."
        loss = one_number("combine", loss, leaf.device, of="the values", remedy=remedy)
    return loss.item(), gradients_by("combine", loss, (leaf,), model)[0]
