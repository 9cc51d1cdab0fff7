"""TRL's trainers with planned steps: `SFTTrainer`, `DPOTrainer`, `GRPOTrainer`, `RLOOTrainer`.

Their losses are TRL's own. TRL gathers numbers over the ranks for its logs in every microbatch; here they are summed at
the end of a step, because ranks have different numbers of microbatches, and a rank in a collective serves no ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import DataError
from lengthwise.core.packages import lacking

try:
    import trl
    from trl.trainer.utils import use_adapter
except ModuleNotFoundError as error:
    raise lacking(error, "trl") from None

from lengthwise.data import NO_LOSS
from lengthwise.integrations.accelerators import AloneOnRank, cached_together, replaced, ungathered
from lengthwise.integrations.arguments import Refusal
from lengthwise.integrations.batches import Examples, refuse_dropped
from lengthwise.integrations.grpo import GRPOTrainer as GRPOTrainer
from lengthwise.integrations.grpo import RLOOTrainer as RLOOTrainer
from lengthwise.integrations.token_losses import OFFLOADING, SLOTS, Answers, TokenLossMixin
from lengthwise.integrations.transformers import PlannedTrainerMixin
from lengthwise.models.image_kinds import IMAGE_COLUMNS
from lengthwise.models.images import MODALITIES
from lengthwise.session import StepResult
from lengthwise.session.row_batch import Row

Result = TypeVar("Result")
_BY_TOKENS = ("entropy", "mean_token_accuracy")  # means over the tokens that have a label
_BALANCE = "aux_loss"
_IDS, _MASK, _COMPLETION = "input_ids", "attention_mask", "completion_mask"
_OF_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


class SFTTrainer(PlannedTrainerMixin, trl.SFTTrainer):
    """TRL's `SFTTrainer` with planned steps; see `PlannedTrainerMixin`.

    Rows that TRL has packed are planned as separate documents. A subclass's own entries of `_metrics` are not logged.
    """

    _refused: Mapping[str, Refusal] = {"activation_offloading": OFFLOADING}
    _library = trl.SFTTrainer

    _valid: list[float]  # number of tokens with a label, by microbatch that `_joined` ran

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
        with replaced(self, aux_loss_enabled=False):  # the engine has the balance loss
            return super()._share_of_loss(model, inputs, normalizer)

    def _balance_of(self, result: StepResult) -> float:
        if result.router_loss is not None:
            self._metrics["train" if self.model.training else "eval"][_BALANCE].append(result.router_loss)
        return super()._balance_of(result)

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
            with ungathered(self.accelerator):
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
        if _BALANCE in found:
            kept[_BALANCE] += found[_BALANCE]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences(Examples):
    """Pairs, padded by the user's collator: `inputs` (2 x pairs, width), first the chosen, then the rejected."""

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
        alone = [dict(example) for example in examples]  # TRL's collator changes its examples
        inputs = dict(self.collate(list(examples)))
        seen = [inputs.pop(name) for name in IMAGE_COLUMNS if name in inputs]
        for name in MODALITIES:
            inputs.pop(name, None)
        others = sorted(inputs.keys() - {_IDS, _MASK, _COMPLETION, *_OF_REFERENCE})
        if others:
            got, remedy = ", ".join(others), "Remove these columns."
            expected = f"{_IDS}, {_MASK}, {_COMPLETION} and images"
            raise DataError("data_collator", expected=expected, got=got, remedy=remedy)
        labels = inputs[_IDS].masked_fill(inputs[_COMPLETION] == 0, NO_LOSS)
        kept = inputs[_MASK].bool()
        images = [_images_of(self.collate([example])) for example in alone] * 2 if seen else [{}] * len(kept)
        rows = tuple(
            {_IDS: inputs[_IDS][number][each].numpy(), "labels": labels[number][each].numpy(), **images[number]}
            for number, each in enumerate(kept)
        )
        return Preferences(rows=rows, num_examples=len(examples), inputs=inputs)

    @staticmethod
    def slots(inputs: Mapping[str, Tensor], first: int) -> Iterator[np.ndarray]:
        """Yield the positions of each row's predictions in a vector of all of them, (2 x pairs x (width - 1),).

        Tokens that predict no token of a completion add 0 to the first.
        """
        width = inputs[_IDS].shape[1] - 1
        kept, counts = inputs[_MASK].bool().numpy(), inputs[_COMPLETION].bool().numpy()
        for number, places in enumerate(map(np.flatnonzero, kept)):
            predicts = np.append(counts[number, places[1:]], False)
            yield np.where(predicts, first + number * width + places, 0)


def _images_of(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the image columns of one side of a collated pair, whose two sides have the same images."""
    columns = {name: inputs[name] for name in IMAGE_COLUMNS if name in inputs}
    return {name: each[: len(each) // 2] for name, each in columns.items()}


class DPOTrainer(TokenLossMixin, trl.DPOTrainer):
    """TRL's `DPOTrainer` with planned steps; see `PlannedTrainerMixin`.

    Model and reference run forward by the plan. Every rank computes TRL's loss from the log-probabilities of all
    tokens. Then the model runs forward and backward, with each log-probability weighted by the loss's gradient. TRL's
    losses see the batches of all ranks together.
    """

    _refused: Mapping[str, Refusal] = {"activation_offloading": OFFLOADING}

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._prepare_dataset(refuse_dropped(dataset), *args, **kwargs)

    def _collator(self, collate: Any) -> Any:
        return PreferenceCollator(collate)

    def _get_num_items_in_batch(self, batch_samples: list[Examples], device: torch.device) -> int:
        return sum(batch.num_examples for batch in batch_samples)

    def _rows_of_update(self, batches: list[Any]) -> list[Row]:
        rows, first = list[Row](), 0
        for batch in batches:
            slots = PreferenceCollator.slots(batch.inputs, first)
            rows += [{**row, SLOTS: each} for row, each in zip(batch.rows, slots, strict=True)]
            first += _num_slots(batch)
        return rows

    def _rows_of_metrics(self, batch: Any) -> Sequence[Row]:
        return [{_IDS: row[_IDS]} for row in batch.rows]

    def _update(self, normalizer: float) -> tuple[float, StepResult]:
        del normalizer
        with torch.enable_grad():
            loss, leaf = self._loss(self._batches, self._planned)
            (weights,) = self._gradients(loss, leaf)
        return loss.item(), self._backward(self._planned, {"log_probs": weights})

    def _evaluate_batch(self, batch: Examples, planned: Any) -> tuple[float, float]:
        loss, _ = self._loss([batch], planned)
        return loss.item() * batch.num_examples, batch.num_examples

    def _loss(self, batches: list[Any], planned: Any) -> tuple[Tensor, Tensor]:
        """Return the mean of TRL's losses of planned batches, and the log-probabilities behind it."""
        names = ["log_probs", "entropy", "mean_logits", "is_top1", *["log_sum_sq_probs"] * bool(self.use_weighting)]
        size = sum(map(_num_slots, batches))
        own = self._gathered(self._session_of_model(), self.model_wrapped, planned, names, size)
        balance = self._new_balance()
        precomputed = self.precompute_ref_logps
        reference = {} if precomputed else self._gathered_of_reference(planned, size)
        leaf = own["log_probs"].requires_grad_()
        total, first = torch.zeros((), dtype=leaf.dtype, device=leaf.device), 0
        with ungathered(self.accelerator):
            for batch in batches:
                last = first + _num_slots(batch)
                inputs = {name: values.to(leaf.device) for name, values in batch.inputs.items()}
                shape = (len(inputs[_IDS]), -1)
                of_model, of_reference = (
                    Answers({name: values[first:last].view(shape) for name, values in each.items()}, balance)
                    for each in (own, reference)
                )
                if not precomputed:
                    inputs |= zip(_OF_REFERENCE, self.compute_ref_log_probs(of_reference, inputs), strict=True)
                with replaced(self, precompute_ref_logps=True):  # inputs have the reference's log-probabilities
                    loss = self.compute_loss(of_model, inputs)  # type: ignore[arg-type] - it only calls the model
                total, first = total + loss, last
        return total / len(batches), leaf

    def _gathered_of_reference(self, planned: Any, size: int) -> dict[str, Tensor]:
        is_model = self.ref_model is None and self.session is not None
        session = self._session_of_model() if is_model else self._session_of_reference()
        model: Any = self.model
        uses_adapter = self.ref_model is None and hasattr(model, "peft_config")
        reference = self.ref_model or self.model_wrapped

        def called(**inputs: Any) -> Any:
            with self.accelerator.autocast():  # before training begins, the model has none of its own
                return reference(**inputs)

        with use_adapter(model, "ref" if "ref" in model.peft_config else None) if uses_adapter else nullcontext():
            return self._gathered(session, called, planned, ["log_probs"], size)

    # Log-probabilities of the reference before training.

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Return the dataset with TRL's columns of the reference; every rank gets the batches of all ranks."""
        try:
            with replaced(self, accelerator=AloneOnRank(self.accelerator)), cached_together(dataset):
                return super()._precompute_ref_logps(dataset, name, batch_size * self.args.world_size)
        finally:
            self._end_reference()

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the reference's log-probabilities of a padded batch's chosen and rejected sides, (pairs,) each."""
        if not isinstance(model, Answers):  # before training
            batch = PreferenceCollator(lambda _: inputs)([inputs])
            rows, size = self._rows_of_update([batch]), _num_slots(batch)
            found = self._gathered_of_reference(rows, size)["log_probs"].view(len(rows), -1)
            model = Answers({"log_probs": found}, self._new_balance())
            inputs = {name: values.to(self.args.device) for name, values in inputs.items()}
        return super().compute_ref_log_probs(model, inputs)


def _num_slots(batch: Preferences) -> int:
    rows, width = batch.inputs[_IDS].shape
    return rows * (width - 1)
