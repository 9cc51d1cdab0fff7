"""TRL's losses that are functions of numbers of every token, log-probabilities for example: what they share.

Models run by the plan, and their values of all tokens come to every rank in one vector. A row's column `slots` says
where each token's prediction stands in it. Every rank runs TRL's loss, in which `Answers` stands for the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from lengthwise.core.errors import ConfigError, LengthwiseError
from lengthwise.integrations.arguments import OFF, Refusal
from lengthwise.integrations.transformers import PlannedTrainerMixin
from lengthwise.models import coefficient_key, has_dropout
from lengthwise.session import Session, StepResult
from lengthwise.session.loss_checks import ShareInChunks
from lengthwise.session.losses import gradients_by
from lengthwise.session.model import hugging_face_model
from lengthwise.session.row_batch import Row

SLOTS = "slots"
NUMBERS = ("log_probs", "entropy")
_UNEQUAL = 1e-3  # relative; rounding is far less
OFFLOADING: Refusal = (OFF, "its hooks would see a plan's microbatches")

LossOf: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From log-probabilities and entropies of all tokens, (2, size), to TRL's loss and its gradient by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSum:
    """A loss that is a sum over tokens, so that each microbatch can compute its gradient.

    columns: columns of all tokens, (size,). weights_of: function from log-probabilities and entropies of some tokens,
    (2, tokens), and their columns to the gradient of the loss by their log-probabilities, (tokens,). where, expected:
    texts of the error if the gradient is another.
    """

    columns: Mapping[str, Tensor]
    weights_of: Callable[[Tensor, dict[str, Tensor]], Tensor]
    where: str
    expected: str

    def check(self, used: Tensor, exact: Tensor) -> None:
        """Check the gradient that microbatches used, (1, tokens), by that of TRL's loss of all tokens, (2, tokens)."""
        apart = (exact - F.pad(used, (0, 0, 0, 1))).abs().max().item()  # none by entropies
        bound = _UNEQUAL * exact.abs().max().item()
        if math.isfinite(bound) and not apart <= bound:  # TRL goes on where its own gradient is not finite
            remedy = "Use the TRL that this version was tested with, or override the loss by the same."
            got = f"a gradient that differs from TRL's by {apart:.1e}"
            raise ConfigError(self.where, expected=f"{self.expected}, as in TRL 1.16", got=got, remedy=remedy)


class TokenLossMixin(PlannedTrainerMixin):
    """Runs model and reference forward for values of every token, and the model backward by their weights."""

    _reference: Session | None = None
    _place_of_reference: torch.device
    precompute_ref_logps = False  # TRL's DPOTrainer sets it

    _router_loss = 0.0
    """The balance loss of the routers over all tokens of the last pass."""
    _balance: Tensor
    """The same, as TRL's last loss got it."""
    _coefficient: float | None = None
    """The gradient of TRL's last loss by it; None: the coefficient of TRL's argument."""
    _is_logged = True
    """False where TRL's loss runs only for its gradient."""

    def _check_division(self) -> None:
        """Accept a mean: TRL's loss gets all rows of a batch at once."""

    def _stages_problems(self, why: str) -> list[LengthwiseError]:
        if (stages := self._session_options.get("stages", 1)) == 1:
            return []
        got, remedy = f"{stages}, but a rank has some of the layers, and {why}", "Give shard='zero3' in place of it."
        return [ConfigError("stages", expected="1", got=got, remedy=remedy)]

    def _takes_whole_logits(self) -> bool:
        """Return False: TRL's head makes logits for some tokens and words at a time."""
        return False

    def _start_session(self, optimizer: Any) -> Session:
        # Its memory counts when the model is measured.
        if self.ref_model is not None and not self.precompute_ref_logps:
            self.ref_model.to(self.args.device)
        with self._balancing():
            return super()._start_session(optimizer)

    def _session_of_model(self) -> Session:
        session = self._trained()
        if self.model.training and has_dropout(session.model):
            remedy = "Leave disable_dropout at True, or set the model's dropout to 0."
            expected = "no dropout, because the model runs twice"
            raise ConfigError("disable_dropout", expected=expected, got="dropout", remedy=remedy)
        return session

    def _session_of_reference(self) -> Session:
        """Return the session of the reference, which is the model itself if there is no other."""
        if self._reference is None:
            # Whole on each rank: it has no gradients and states.
            whole = {"shard": "zero1", "ranks_per_node": None, "stages": 1, "virtual": 1}
            options = {**self._session_options, "recompute": "none", "offload": None, **whole}
            if self.session is not None and not self.precompute_ref_logps:  # else it was measured without the reference
                options["capacity_tokens"] = self.session.capacity_tokens  # forward alone needs less
            if self.ref_model is not None:
                self.ref_model.requires_grad_(False)
            reference = self.ref_model or self.model
            self._place_of_reference = next(reference.parameters()).device
            timeout = float(self.args.ddp_timeout)
            self._reference = Session(reference.to(self.args.device), timeout_seconds=timeout, **options)
        return self._reference

    def _end_reference(self) -> None:
        """Close the session of the reference, and move the reference back to where it was."""
        if self._reference is not None:
            self._reference.close()
            self._reference.model.to(self._place_of_reference)
            self._reference = None

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    def _gathered(
        self, session: Session, model: Any, planned: Any, names: Sequence[str], size: int
    ) -> dict[str, Tensor]:
        """Run a model forward by the plan; return the named values of all tokens, (size,) each, on every rank."""
        device, wide = self.args.device, self._wide
        sums = torch.zeros(len(names), size, dtype=wide, device=device)

        def collect(_model: Any, inputs: dict[str, Any]) -> Tensor:
            slots, found = called(model, inputs)
            values = torch.stack([field_of(found, name).to(wide) for name in names])
            sums.index_add_(1, slots, values)
            return torch.zeros((), device=device)

        with self._balancing():
            result = session.evaluate(planned, compute_loss=self._plain(collect), normalizer=1.0)
        self._router_loss = result.router_loss or 0.0
        session.sum_over_ranks(sums)
        found = dict(zip(names, sums, strict=True))
        return {name: values > 0.5 if name == "is_top1" else values for name, values in found.items()}

    def _numbers(self, planned: Any, size: int) -> Tensor:
        """Run the model forward by the plan; return log-probabilities and entropies of all tokens, (2, size)."""
        found = self._gathered(self._session_of_model(), self.model_wrapped, planned, NUMBERS, size)
        return torch.stack([found[name] for name in NUMBERS])

    def _updated(
        self, rows: list[Row], size: int, loss_of: LossOf, as_sum: TokenSum | None
    ) -> tuple[float, StepResult]:
        """Run forward and backward of an update; return TRL's loss and the result.

        as_sum: the same loss as a sum over tokens; without it the model runs forward once more.
        """
        if as_sum is not None:
            return self._update_of_sum(rows, size, loss_of, as_sum)
        planned = next(self._trained().batches([rows]))
        loss, weights = loss_of(self._numbers(planned, size))
        return loss.item(), self._backward(planned, dict(zip(NUMBERS, weights, strict=True)))

    def _update_of_sum(self, rows: list[Row], size: int, loss_of: LossOf, as_sum: TokenSum) -> tuple[float, StepResult]:
        values = torch.zeros(3, size, dtype=self._wide, device=self.args.device)  # both numbers, the gradient

        def share(_model: Any, inputs: dict[str, Any]) -> Tensor:
            slots, found = called(self.model_wrapped, inputs)
            assert found.label_mask is not None, "TRL's head gives it"
            labelled = found.label_mask[0].nonzero()[:, 0]  # the only wait for the device
            slots, own = slots[labelled], [field_of(found, name)[labelled] for name in NUMBERS]
            if not len(slots):
                return field_of(found, "log_probs").sum() * 0.0
            numbers = torch.stack(own).detach().to(self._wide)
            with self._unlogged():
                weights = as_sum.weights_of(numbers, {name: each[slots] for name, each in as_sum.columns.items()})
            values.index_add_(1, slots, torch.cat([numbers, weights[None]]))
            return (own[0] * weights).sum()

        with self._balancing():
            result = self._trained().backward(rows, compute_loss=self._plain(share), normalizer=1.0)
        self._router_loss = result.router_loss or 0.0
        numbers, used = self._trained().sum_over_ranks(values).split(2)
        loss, exact = loss_of(numbers)
        as_sum.check(used, exact)
        if self.aux_loss_enabled:
            weight = torch.tensor([[self.router_aux_loss_coef]])
            as_sum.check(weight, torch.tensor([[self._coefficient], [0.0]]))
        return loss.item(), result

    def _backward(self, planned: Any, weights: Mapping[str, Tensor]) -> StepResult:
        """Run the model forward and backward by the plan. weights: (size,) by name, of the values of all tokens."""

        def weighted(_model: Any, inputs: dict[str, Any]) -> Tensor:
            slots, found = called(self.model_wrapped, inputs)
            parts = [(field_of(found, name) * each[slots]).sum() for name, each in weights.items()]
            return torch.stack(parts).sum()

        with self._balancing(self._coefficient):
            return self._trained().backward(planned, compute_loss=self._plain(weighted), normalizer=1.0)

    # The balance loss of routers: a forward of all tokens gives it to TRL's loss, and backward weighs it by the
    # gradient that this has by it.

    def _new_balance(self) -> Tensor:
        """Return the balance loss of the last pass, (), for TRL's next loss."""
        how: dict[str, Any] = {"dtype": self._wide, "device": self.args.device, "requires_grad": True}
        self._balance = torch.tensor(self._router_loss, **how)
        return self._balance

    def _gradients(self, loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of TRL's loss by the numbers of tokens; keep its gradient by the balance loss."""
        *found, by_balance = gradients_by("compute_loss", loss, (*leaves, self._balance), self.model)
        self._coefficient = by_balance.item()
        return tuple(found)

    @contextmanager
    def _balancing(self, coefficient: float | None = None) -> Iterator[None]:
        """Ask for the balance loss in the model's config inside the block, as TRL's losses do in each call."""
        config: Any = hugging_face_model(self.model).config.get_text_config()
        if not hasattr(config, "output_router_logits"):
            yield
            return
        weight = self.router_aux_loss_coef if coefficient is None else coefficient
        asked = {"output_router_logits": self.aux_loss_enabled, coefficient_key(config.model_type): weight}
        kept = {name: getattr(config, name, None) for name in asked}
        config.update(asked)
        try:
            yield
        finally:
            config.update(kept)

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        """Log nothing of TRL's loss inside the block, where it runs only for its gradient."""
        kept, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        was_logged, self._is_logged = self._is_logged, False
        try:
            yield
        finally:
            self._metrics["train"], self._is_logged = kept, was_logged

    def _plain(self, compute_loss: Callable[[Any, dict[str, Any]], Tensor]) -> ShareInChunks:
        """Return the loss without the session's autocast: accelerate has wrapped the model in one."""

        def plain(model: Any, inputs: dict[str, Any]) -> Tensor:
            with torch.autocast(self.args.device.type, enabled=False):
                return compute_loss(model, inputs)

        return ShareInChunks(plain)


class Answers:
    """Stands for a model in TRL's loss: returns values that were gathered before."""

    def __init__(self, fields: Mapping[str, Tensor], balance: Tensor) -> None:
        self._fields, self._balance = fields, balance

    def __call__(self, **_inputs: Any) -> FusedCausalLMOutput:
        """Return these fields and the routers' balance loss, whatever the inputs are."""
        return FusedCausalLMOutput(**self._fields, aux_loss=self._balance)


def called(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, FusedCausalLMOutput]:
    """Return the slots of this rank's predictions, and the model's output for them."""
    slots = inputs[SLOTS][0, :-1]
    return slots, model(**{name: each for name, each in inputs.items() if name != SLOTS}, fused_lm_head=True)


def field_of(found: FusedCausalLMOutput, name: str) -> Tensor:
    """Return the named values of this rank's predictions, (predictions,)."""
    values = getattr(found, name)
    assert values is not None, "TRL asked its head for it"
    return values[0]
