"""TRL's trainers with planned steps: `SFTTrainer` and `DPOTrainer`.

Their losses are TRL's own. TRL gathers numbers over the ranks for its logs in every microbatch; here they are summed at
the end of a step, because ranks have different numbers of microbatches, and a rank in a collective serves no ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import trl
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput, use_adapter

from lengthwise.core.errors import ConfigError, DataError
from lengthwise.data import NO_LOSS
from lengthwise.integrations.arguments import OFF, Refusal
from lengthwise.integrations.batches import Examples, refuse_dropped
from lengthwise.integrations.transformers import PlannedTrainerMixin
from lengthwise.models import has_dropout
from lengthwise.session import Session, StepResult
from lengthwise.session.loss_checks import ShareInChunks
from lengthwise.session.row_batch import Row

Result = TypeVar("Result")
_OFFLOADING: Refusal = (OFF, "its hooks would see a plan's microbatches")
_BY_TOKENS = ("entropy", "mean_token_accuracy")  # means over the tokens that have a label
_SLOTS = "slots"
_IDS, _MASK, _COMPLETION = "input_ids", "attention_mask", "completion_mask"


class SFTTrainer(PlannedTrainerMixin, trl.SFTTrainer):
    """TRL's `SFTTrainer` with planned steps; see `PlannedTrainerMixin`.

    Rows that TRL has packed are planned as separate documents. A subclass's own entries of `_metrics` are not logged.
    """

    _refused: Mapping[str, Refusal] = {"activation_offloading": _OFFLOADING}
    _library = trl.SFTTrainer

    _valid: list[float]  # number of tokens with a label, by microbatch that `_joined` ran

    def _check_division(self) -> None:
        super()._check_division()
        _refuse_balance(self)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        dataset = dataset if formatting_func is not None else refuse_dropped(dataset)
        return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)

    def _takes_whole_logits(self) -> bool:
        return not self._divides_by_items() or self.label_smoother is not None

    def _share_of_loss(self, model: Any, inputs: Mapping[str, Any], normalizer: float) -> Tensor:
        self._valid.append(float((inputs["labels"][:, 1:] != NO_LOSS).sum()))
        # TRL counts tokens by it; the count is replaced afterwards.
        inputs = {**inputs, _MASK: torch.ones_like(inputs[_IDS])} if _MASK not in inputs else inputs
        return super()._share_of_loss(model, inputs, normalizer)

    def _update(self, normalizer: float) -> tuple[float, StepResult]:
        tokens = self._total_train_tokens
        loss, result = self._joined("train", lambda: super(SFTTrainer, self)._update(normalizer))
        self._total_train_tokens = tokens + result.num_tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss, result

    def _evaluate_batch(self, batch: Examples, planned: Any) -> tuple[float, float]:
        return self._joined("eval", lambda: super(SFTTrainer, self)._evaluate_batch(batch, planned))

    def _joined(self, mode: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, and log the means over the tokens of all ranks' microbatches in it."""
        kept, self._metrics[mode], self._valid = self._metrics[mode], defaultdict(list), []
        try:
            with _ungathered(self.accelerator):
                result = work()
            found = self._metrics[mode]
        finally:
            self._metrics[mode] = kept
        numbers = [  # without a label TRL's means are NaN
            [value * weight for value, weight in zip(found[name], self._valid) if weight]  # noqa: B905
            for name in _BY_TOKENS
        ]
        sums = torch.tensor([*map(sum, numbers), sum(self._valid)], dtype=torch.float64)
        *sums, weight = self._trained().sum_over_ranks(sums).tolist()
        for name, total in zip(_BY_TOKENS, sums, strict=True):
            kept[name].append(total / max(weight, 1.0))
        kept["num_tokens"] = [self._total_train_tokens]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences(Examples):
    """Pairs as the user's collator pads them: `inputs` (2 x pairs, width), first the chosen, then the rejected."""

    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class PreferenceCollator:
    """A `collate_fn` that makes a row of each side of a pair, with labels on its completion.

    Raises:
        DataError: a column is not text.
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: Sequence[Any]) -> Preferences:
        """Return the examples' rows: all chosen ones, then all rejected ones."""
        inputs = self.collate(list(examples))
        others = sorted(inputs.keys() - {_IDS, _MASK, _COMPLETION})
        if others:
            got, remedy = ", ".join(others), "Images and precomputed reference log-probabilities are not supported."
            expected = f"{_IDS}, {_MASK} and {_COMPLETION}"
            raise DataError("data_collator", expected=expected, got=got, remedy=remedy)
        labels = inputs[_IDS].masked_fill(inputs[_COMPLETION] == 0, NO_LOSS)
        kept = inputs[_MASK].bool()
        rows = tuple(
            {_IDS: inputs[_IDS][number][each].numpy(), "labels": labels[number][each].numpy()}
            for number, each in enumerate(kept)
        )
        return Preferences(rows=rows, num_examples=len(examples), inputs=inputs)

    @staticmethod
    def slots(inputs: Mapping[str, Tensor], first: int) -> Iterator[np.ndarray]:
        """Yield the positions of each row's tokens in a vector of all predictions, (2 x pairs x (width - 1),)."""
        width = inputs[_IDS].shape[1] - 1
        for number, kept in enumerate(inputs[_MASK].bool()):
            # The last token of the longest row predicts nothing, and adds 0 to its neighbour.
            yield first + number * width + np.minimum(np.flatnonzero(kept.numpy()), width - 1)


class DPOTrainer(PlannedTrainerMixin, trl.DPOTrainer):
    """TRL's `DPOTrainer` with planned steps; see `PlannedTrainerMixin`.

    Model and reference run forward by the plan. Every rank computes TRL's loss from the log-probabilities of all
    tokens. Then the model runs forward and backward, with each log-probability weighted by the loss's gradient. TRL's
    losses see the batches of all ranks together.
    """

    _refused: Mapping[str, Refusal] = {
        "activation_offloading": _OFFLOADING,
        "precompute_ref_log_probs": (OFF, "it runs whole sequences on every rank; the reference runs by the plan"),
    }

    _reference: Session | None = None

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._prepare_dataset(refuse_dropped(dataset), *args, **kwargs)

    def _check_division(self) -> None:
        """Accept a mean: TRL gets all pairs of a preference loss at once."""
        _refuse_balance(self)

    def _takes_whole_logits(self) -> bool:
        """Return False: TRL's head makes logits for some tokens and words at a time."""
        return False

    def _collator(self, collate: Any) -> Any:
        return PreferenceCollator(collate)

    def _get_num_items_in_batch(self, batch_samples: list[Examples], device: torch.device) -> int:
        return sum(batch.num_examples for batch in batch_samples)

    def _rows_of_update(self, batches: list[Any]) -> list[Row]:
        rows, first = list[Row](), 0
        for batch in batches:
            slots = PreferenceCollator.slots(batch.inputs, first)
            rows += [{**row, _SLOTS: each} for row, each in zip(batch.rows, slots, strict=True)]
            first += _num_slots(batch)
        return rows

    def _update(self, normalizer: float) -> tuple[float, StepResult]:
        del normalizer
        with torch.enable_grad():
            loss, leaf = self._loss(self._batches, self._planned)
            (weights,) = torch.autograd.grad(loss, leaf)

        def weighted(_model: Any, inputs: dict[str, Any]) -> Tensor:
            slots, found = _called(self.model_wrapped, inputs)
            return (_field(found, "log_probs") * weights[slots]).sum()

        result = self._trained().backward(self._planned, compute_loss=self._plain(weighted), normalizer=1.0)
        return loss.item(), result

    def _evaluate_batch(self, batch: Examples, planned: Any) -> tuple[float, float]:
        loss, _ = self._loss([batch], planned)
        return loss.item() * batch.num_examples, batch.num_examples

    def _loss(self, batches: list[Any], planned: Any) -> tuple[Tensor, Tensor]:
        """Return the mean of TRL's losses of planned batches, and the log-probabilities that it depends on."""
        names = ["log_probs", "entropy", "mean_logits", "is_top1", *["log_sum_sq_probs"] * bool(self.use_weighting)]
        size = sum(map(_num_slots, batches))
        own = self._gathered(self._session_of_model(), self.model_wrapped, planned, names, size)
        reference = self._gathered_of_reference(planned, size)
        leaf = own["log_probs"].requires_grad_()
        total, first = torch.zeros((), dtype=leaf.dtype, device=leaf.device), 0
        with _ungathered(self.accelerator):
            for batch in batches:
                last = first + _num_slots(batch)
                inputs = {name: values.to(leaf.device) for name, values in batch.inputs.items()}
                shape = (len(inputs[_IDS]), -1)
                of_model, of_reference = (
                    _Answers({name: values[first:last].view(shape) for name, values in each.items()})
                    for each in (own, reference)
                )
                chosen, rejected = self.compute_ref_log_probs(of_reference, inputs)
                inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
                total, first = total + self._loss_of_batch(of_model, inputs), last
        return total / len(batches), leaf

    def _loss_of_batch(self, answers: _Answers, inputs: dict[str, Tensor]) -> Tensor:
        """Return `compute_loss` of a batch whose inputs have the reference's log-probabilities."""
        self.precompute_ref_logps = True
        try:
            return self.compute_loss(answers, inputs)  # type: ignore[arg-type] - it only calls the model
        finally:
            self.precompute_ref_logps = False

    def _start_session(self, optimizer: Any) -> Session:
        if self.ref_model is not None:  # its memory counts when the model is measured
            self.ref_model.to(self.args.device)
        return super()._start_session(optimizer)

    def _gathered_of_reference(self, planned: Any, size: int) -> dict[str, Tensor]:
        if self.ref_model is not None:
            if self._reference is None:
                capacity = self._trained().capacity_tokens  # forward alone needs less
                options = {**self._session_options, "recompute": "none", "capacity_tokens": capacity, "offload": None}
                # Whole on each rank: it has no gradients and states.
                options |= {"shard": "zero1", "ranks_per_node": None, "stages": 1, "virtual": 1}
                reference = self.ref_model.to(self.args.device).requires_grad_(False)
                self._reference = Session(reference, timeout_seconds=float(self.args.ddp_timeout), **options)
            return self._gathered(self._reference, self.ref_model, planned, ["log_probs"], size)
        model: Any = self.model
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            return self._gathered(self._session_of_model(), self.model_wrapped, planned, ["log_probs"], size)

    def _session_of_model(self) -> Session:
        session = self._trained()
        if self.model.training and has_dropout(session.model):
            remedy = "Leave disable_dropout at True, or set the model's dropout to 0."
            expected = "no dropout, because the model runs twice"
            raise ConfigError("disable_dropout", expected=expected, got="dropout", remedy=remedy)
        return session

    def _gathered(
        self, session: Session, model: Any, planned: Any, names: Sequence[str], size: int
    ) -> dict[str, Tensor]:
        """Run a model forward by the plan; return the named values of all tokens, (size,) each, on every rank."""
        device = self.args.device
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        sums = torch.zeros(len(names), size, dtype=wide, device=device)

        def collect(_model: Any, inputs: dict[str, Any]) -> Tensor:
            slots, found = _called(model, inputs)
            values = torch.stack([_field(found, name).to(wide) for name in names])
            sums.index_add_(1, slots, values)
            return torch.zeros((), device=device)

        session.evaluate(planned, compute_loss=self._plain(collect), normalizer=1.0)
        session.sum_over_ranks(sums)
        found = dict(zip(names, sums, strict=True))
        return {name: values > 0.5 if name == "is_top1" else values for name, values in found.items()}

    def _plain(self, compute_loss: Callable[[Any, dict[str, Any]], Tensor]) -> ShareInChunks:
        """Return the loss without the session's autocast: accelerate has wrapped the model in one."""

        def plain(model: Any, inputs: dict[str, Any]) -> Tensor:
            with torch.autocast(self.args.device.type, enabled=False):
                return compute_loss(model, inputs)

        return ShareInChunks(plain)


class _Answers:
    """Stands for a model in TRL's loss: returns values that were gathered before."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._fields = fields

    def __call__(self, **_inputs: Any) -> FusedCausalLMOutput:
        return FusedCausalLMOutput(**self._fields)


def _called(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, FusedCausalLMOutput]:
    """Return the slots of this rank's predictions, and the model's output for them."""
    slots = inputs[_SLOTS][0, :-1]
    return slots, model(**{name: each for name, each in inputs.items() if name != _SLOTS}, fused_lm_head=True)


def _field(found: FusedCausalLMOutput, name: str) -> Tensor:
    values = getattr(found, name)
    assert values is not None, "TRL asked its head for it"
    return values[0]


def _num_slots(batch: Preferences) -> int:
    rows, width = batch.inputs[_IDS].shape
    return rows * (width - 1)


@contextmanager
def _ungathered(accelerator: Any) -> Iterator[None]:
    """Make the accelerator's gathers return their argument, which is this rank's or the same on all ranks."""
    names = ("gather", "gather_for_metrics")
    kept = {name: getattr(accelerator, name) for name in names}
    for name in names:
        setattr(accelerator, name, lambda value, *_, **__: value)
    try:
        yield
    finally:
        for name, each in kept.items():
            setattr(accelerator, name, each)


def _refuse_balance(trainer: Any) -> None:
    if trainer.aux_loss_enabled:
        remedy = "Set router_aux_loss_coef to 0."
        got = f"{trainer.router_aux_loss_coef:g}: the loss is a mean per microbatch, which depends on the plan"
        raise ConfigError("router_aux_loss_coef", expected="0", got=got, remedy=remedy)
