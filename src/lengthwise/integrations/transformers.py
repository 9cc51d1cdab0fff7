"""Hugging Face's Trainer with planned steps: `Trainer`, and a mixin for its subclasses.

The loop, data sets, collators, schedules, callbacks, logging and checkpoints stay Trainer's. Every rank reads the
global batch of all ranks, in the order of a one-process Trainer; `Session` plans and runs it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Unpack

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems, short_traceback
from lengthwise.integrations.accelerators import leave_data_and_gradients, replaced
from lengthwise.integrations.arguments import (
    WITH_PARTS,
    Refusal,
    problems_of,
    recompute_of,
    refuse_mixed,
    refuse_with_parts,
)
from lengthwise.integrations.batches import Examples, PlannedUpdates, RowCollator, checked
from lengthwise.integrations.known import check_rows, rows_of_loader, rows_of_training, warn_of_no_label
from lengthwise.integrations.predictions import Predictions
from lengthwise.integrations.trainer_loss import balance_of, check_division, is_next_tokens, loss_of, takes_items
from lengthwise.integrations.trainer_state import load_state, save_state
from lengthwise.models import check_adapters
from lengthwise.session import Session, StepResult
from lengthwise.session.keywords import StepOptions, keyword_problems
from lengthwise.session.model import check_trained_dtype
from lengthwise.session.row_batch import Row

_Base: Any = transformers.Trainer if TYPE_CHECKING else object

if TYPE_CHECKING:
    from typing_extensions import TypedDict  # Python 3.11's has no extra_items

    class TrainerOptions(StepOptions, TypedDict, total=False, extra_items=Any):
        """Keywords of a session and of the Trainer."""


class PlannedTrainerMixin(_Base):
    """Planned steps for a Trainer: `class Mine(PlannedTrainerMixin, MyTrainer): ...`.

    The global batch stays per_device_train_batch_size x ranks x gradient_accumulation_steps, under one plan.

    Args:
        *args: arguments of the Trainer.
        capacity_tokens: maximum tokens of a rank in one microbatch, which bounds memory in place of
            per_device_train_batch_size; auto measures it.
        shard, ranks_per_node, stages, virtual: as in `Session`; a model to be sharded stays in host memory until then.
        heads, offload, offload_optimizer, planner, measurements: as in `Session`.
        attention, compile, fused_layers, experts, overlap, share_prefixes: as in `Session`; the Trainer's
            use_liger_kernel means fused_layers="liger".
        **kwargs: keywords of the Trainer.

    Raises:
        ConfigError, Problems: arguments that would not keep their meaning; one message has all.
    """

    @short_traceback
    def __init__(self, *args: Any, **options: Unpack[TrainerOptions]) -> None:
        refuse_mixed(type(self))
        kwargs: dict[str, Any] = dict(options)
        if "recompute" in kwargs:
            remedy = "Set gradient_checkpointing=True in them for 'layer', or remove it."
            got = f"recompute={kwargs['recompute']!r} of the trainer"
            raise ConfigError("recompute", expected="activation checkpointing by the arguments", got=got, remedy=remedy)
        self.session: Session | None = None
        self._session_options = {name: kwargs.pop(name) for name in StepOptions.__annotations__ if name in kwargs}
        self._reading: Iterator[Any] | None = None
        self._updates: PlannedUpdates | None = None
        self._batches: list[Examples] = []
        self._planned: Any = None
        self._last: StepResult | None = None
        self._predictions: Predictions | None = None
        self._loss_is_checked = self._has_warned = False
        self._num_parameters = 0
        positional = [self._own(each) if isinstance(each, TrainingArguments) else each for each in args]
        if isinstance(kwargs.get("args"), TrainingArguments):
            kwargs["args"] = self._own(kwargs["args"])
        if "recompute" not in self._session_options:  # the Trainer makes its own TrainingArguments
            raise_problems(keyword_problems(self._session_options))
        super().__init__(*positional, **kwargs)
        check_adapters(self.model)
        check_trained_dtype(self.model)
        self._is_denied = not self.model_accepts_loss_kwargs and not is_next_tokens(self)  # by the model's class
        self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs or takes_items(self.model)
        self._check_division()

    # What a subclass for another library overrides.

    _refused: Mapping[str, Refusal] = {}
    """Refused arguments of a subclass of TrainingArguments, in the form of `REFUSED`."""

    def _problems(self, arguments: Any) -> list[LengthwiseError]:
        return []  # those that more than one argument causes

    _library: Any = transformers.Trainer
    """The class whose loss divides by num_items_in_batch."""

    def _collator(self, collate: Any) -> Any:
        return RowCollator(collate)

    def _rows_of_update(self, batches: list[Examples]) -> list[Row]:
        return [row for batch in batches for row in batch.rows]

    def _rows_of_metrics(self, batch: Any) -> Sequence[Row]:
        """Return the rows of a batch with the labels for `compute_metrics`, by default its tokens."""
        return batch.rows

    def _divides_by_items(self) -> bool:
        own = getattr(self.compute_loss, "__func__", None)  # the user may have set another on the trainer
        return own is self._library.compute_loss and self.compute_loss_func is None

    def _takes_whole_logits(self) -> bool:
        return not is_next_tokens(self)

    def _check_division(self) -> None:
        check_division(self)

    # Its arguments.

    def _own(self, arguments: Any) -> Any:
        """Return a copy of the arguments that leaves activation checkpointing and fused layers to the session."""
        if "recompute" in self._session_options:
            return arguments
        problems = problems_of(arguments, refused=self._refused)
        problems += self._problems(arguments)
        if arguments.use_liger_kernel and self._session_options.get("fused_layers") == "off":
            expected, remedy = "auto or liger beside use_liger_kernel", "Remove one of them."
            problems.append(ConfigError("fused_layers", expected=expected, got="off", remedy=remedy))
        raise_problems([*problems, *keyword_problems(self._session_options)])
        shard, stages = self._session_options.get("shard", "auto"), self._session_options.get("stages", 1)
        if (shard in ("zero3", "hybrid") and arguments.world_size > 1) or stages > 1:
            refuse_with_parts(arguments)
        if shard == "auto" and any(getattr(arguments, name, False) for name in WITH_PARTS):
            self._session_options["shard"] = "zero1"
        self._session_options["recompute"] = recompute_of(arguments)
        if arguments.use_liger_kernel:
            self._session_options["fused_layers"] = "liger"
        arguments = copy.copy(arguments)
        arguments.use_liger_kernel = False  # else Trainer patches transformers for the whole process
        arguments.activation_checkpointing = arguments.gradient_checkpointing = False
        arguments.average_tokens_across_devices = False  # else compute_loss multiplies, to undo DDP's mean
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that wraps models in autocast only, and gives every rank all data."""
        self.args = self._own(self.args)
        super().create_accelerator_and_postprocess()
        leave_data_and_gradients(self.accelerator)

    # Reading.

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        with replaced(self, data_collator=self._collator(self.data_collator)):
            return super()._get_dataloader(dataset, description, batch_size * self.args.world_size, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of the next update, whose plan was made ahead, and their number of loss tokens."""
        if self._updates is None or self._reading is not epoch_iterator:
            self._end_updates()
            self._reading = epoch_iterator
            self._updates = PlannedUpdates(self._trained(), checked(epoch_iterator), rows_of=self._rows_of_update)
        found = self._updates.next(num_batches)
        if found is None:
            return [], None
        self._batches, self._planned = found
        return self._batches, self._get_num_items_in_batch(self._batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Examples], device: torch.device) -> int | None:
        return sum(batch_sample.num_loss_tokens for batch_sample in batch_samples) or None

    def _end_updates(self) -> None:
        if self._updates is not None:
            self._updates.close()
        self._updates = self._reading = None

    def _track_num_input_tokens(self, inputs: Examples) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs.num_tokens

    def floating_point_ops(self, inputs: Any) -> int:
        """Return Trainer's estimate for this rank's share of some examples, without padding."""
        return 6 * inputs.num_tokens * self._num_parameters // self.args.world_size

    # A step.

    @short_traceback
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._end_updates()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        session = self.session
        if session is None or session.optimizer is not self.optimizer or session.model is not self.model:
            self._start_session(self.optimizer)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        check_rows(rows_of_training(self), self._trained())
        return prepared

    def _start_session(self, optimizer: Any) -> Session:
        if self.session is not None:
            if self.session.engine.is_cut:
                got = "train() after evaluate(), or with another optimizer"
                remedy = "Set eval_on_start=True, or give the saved model to a new trainer."
                expected = "one training with sharded parameters, as each rank keeps only its part of the model"
                raise ConfigError("train", expected=expected, got=got, remedy=remedy)
            self.session.close()
            self.session = None
        self._num_parameters = self.model.num_parameters(exclude_embeddings=True)  # while it is whole
        self.session = session = Session(
            self.model,
            optimizer,
            device=self.args.device,
            precision="bf16" if self.accelerator.mixed_precision == "bf16" else None,
            seed=self.args.seed,
            timeout_seconds=float(self.args.ddp_timeout),
            **self._session_options,
        )
        if session.world_size != self.args.world_size:  # accelerate does not join ranks on CPUs by itself
            remedy = "Set use_cpu=True in them, or ACCELERATE_USE_CPU=true for the ranks."
            expected = f"arguments of the {session.world_size:,} processes that were started"
            raise ConfigError("world_size", expected=expected, got=f"{self.args.world_size:,}", remedy=remedy)
        session.expect(whole_logits=self._takes_whole_logits())
        if session.engine.is_cut:
            refuse_with_parts(self.args)
        return session

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        options = self._session_options
        # Otherwise it may not fit, and the session moves it or its parts.
        if options.get("shard") == "zero1" and options.get("stages", 1) == 1:
            super()._move_model_to_device(model, device)

    def _trained(self) -> Session:
        assert self.session is not None, "train() has made it"
        return self.session

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Run the whole update at its last batch; return the loss of the global batch, 0 for the others.

        As in Trainer, gradients of the batches that a stream has left at its end add to those of the next update.
        """
        if not self.accelerator.sync_gradients and inputs is not self._batches[-1]:
            return torch.zeros((), device=self.args.device)
        self.model.train()
        loss, self._last = self._update(float(num_items_in_batch or 1))
        if not num_items_in_batch:  # a mean over nothing, which plain Trainer does not log
            loss, self._has_warned = math.nan, self._has_warned or warn_of_no_label(self)
        return torch.tensor(loss, dtype=torch.float32, device=self.args.device)

    def _update(self, normalizer: float) -> tuple[float, StepResult]:
        if not self._loss_is_checked:
            self._check_loss(normalizer)
        compute_loss = loss_of(self, self._planned, normalizer)
        result = self._trained().backward(self._planned, compute_loss=compute_loss, normalizer=normalizer)
        return result.loss + self._balance_of(result), result

    def _balance_of(self, result: StepResult) -> float:
        return balance_of(self, result)

    def _share_of_loss(self, model: nn.Module, inputs: Mapping[str, Any], normalizer: float) -> Tensor:
        """Return Trainer's compute_loss of a microbatch, without the session's autocast: the model has its own."""
        with torch.autocast(self.args.device.type, enabled=False):
            return self.compute_loss(self.model_wrapped, dict(inputs), num_items_in_batch=normalizer)  # type: ignore[arg-type]

    def _check_loss(self, normalizer: float) -> None:
        """Refuse a loss that does not divide by num_items_in_batch, such as a mean over a microbatch."""
        self._loss_is_checked = self._divides_by_items() and not self._is_denied
        if self._loss_is_checked:
            return
        losses = [self._evaluated(self._planned, factor * normalizer).loss for factor in (1.0, 2.0)]
        self._loss_is_checked = losses[0] != 0.0  # a batch without a label shows nothing
        if abs(losses[0] - 2.0 * losses[1]) > 1e-2 * abs(losses[0]):
            expected = "half the loss for twice the num_items_in_batch"
            got = f"{losses[0]:g}, and {losses[1]:g} for twice the num_items_in_batch"
            remedy = "Return a sum over the tokens, divided by num_items_in_batch: microbatches differ in size."
            raise ConfigError("compute_loss", expected=expected, got=got, remedy=remedy)

    def _evaluated(self, sequences: Any, normalizer: float) -> StepResult:
        compute_loss = loss_of(self, sequences, normalizer)
        return self._trained().evaluate(sequences, compute_loss=compute_loss, normalizer=normalizer)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._trained().clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._trained().grad_norm if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; add ratios of the last step's plan to a training loss."""
        if "loss" in logs and self._last is not None:
            of_plan = {name: getattr(self._last, name) for name in ("ring_token_ratio", "imbalance_ratio")}
            logs = {**logs, **of_plan}
        super().log(logs, *args, **kwargs)

    # Evaluation.

    @short_traceback
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the mean loss over the tokens of all batches, and `compute_metrics` of the logits of all rows.

        Raises:
            ConfigError: predictions are asked for, or no token has a label.
        """
        if metric_key_prefix == "test":
            remedy = "Call the model itself: between steps it is a plain model."
            raise ConfigError("predict", expected="evaluate or train", got="predict", remedy=remedy)
        session = self.session
        if session is None or session.model is not self.model:
            self.accelerator.prepare_model(self.model)
            session = self._start_session(None)
        if not self.is_in_train:
            check_rows(rows_of_loader(dataloader), session)
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        total = weight = examples = 0.0
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self._predictions = None if only_loss or self.compute_metrics is None else Predictions(self)
        for num_examples, loss, counts in self._evaluated_batches(session, dataloader):
            examples, total, weight = examples + num_examples, total + loss, weight + counts
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        if not weight:
            remedy = "Give labels that are not -100."
            raise ConfigError("eval_dataset", expected="a token with a label", got="none", remedy=remedy)
        metrics = {} if self._predictions is None else self._predictions.metrics(metric_key_prefix)
        metrics[f"{metric_key_prefix}_loss"] = total / weight
        self._predictions = None
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=int(examples))  # type: ignore[arg-type]

    def _evaluated_batches(self, session: Session, dataloader: Any) -> Iterator[tuple[int, float, float]]:
        """Yield per batch: number of examples, sum of losses, number of losses."""
        updates = PlannedUpdates(session, checked(iter(dataloader)), rows_of=self._rows_of_update)
        try:
            while (found := updates.next(1)) is not None:
                (batch,), planned = found
                loss, counts = self._evaluate_batch(batch, planned) if batch.num_loss_tokens else (0.0, 0.0)
                if self._predictions is not None:
                    self._predictions.add(session, self._rows_of_metrics(batch), loss / max(counts, 1))
                yield batch.num_examples, loss, counts
        finally:
            updates.close()

    def _evaluate_batch(self, batch: Examples, planned: Any) -> tuple[float, float]:
        result, number = self._evaluated(planned, 1.0), batch.num_loss_tokens
        return result.loss + number * self._balance_of(result), number

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as Trainer does. Collective if parameters are sharded: call it on all ranks."""
        with nullcontext() if self.session is None else self.session.whole_on_first():
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_state(self, self._trained(), output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_state(self, self._trained(), checkpoint)


class Trainer(PlannedTrainerMixin, transformers.Trainer):
    """transformers' `Trainer` with planned steps; see `PlannedTrainerMixin`."""
