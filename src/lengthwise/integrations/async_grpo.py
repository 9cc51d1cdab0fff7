"""TRL's `AsyncGRPOTrainer` with planned steps: rollouts come from a queue, and all of an update run by one plan.

Rank 0 takes the rollouts of an update from the worker's queue, by TRL's rule for stale ones, and sends their tokens to
all ranks. The worker, checks of its health, the transfer of weights and checkpoints stay TRL's.

TRL's loss is a sum over tokens, divided by a number that it gets. A microbatch asks it for the gradient of its own
tokens, divided by the tokens of the update. After the step TRL's loss of all tokens gives loss and metrics, and checks
that gradient. A `compute_loss` of your own may be any function of log-probabilities and entropies, and takes one more
forward pass.

TRL calls this trainer experimental, so `lengthwise.integrations.trl` does not import it.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lengthwise.comm.exchange import from_first
from lengthwise.core.errors import ConfigError, DataError, LengthwiseError, RankError, TransferError
from lengthwise.core.packages import lacking

try:
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
except ModuleNotFoundError as error:
    raise lacking(error, "trl") from None

from lengthwise.data import NO_LOSS
from lengthwise.integrations.accelerators import ungathered
from lengthwise.integrations.batches import Examples
from lengthwise.integrations.rollouts import refuse_long_completions
from lengthwise.integrations.token_losses import NUMBERS, SLOTS, Answers, TokenLossMixin, TokenSum
from lengthwise.session import Session, StepResult

_KEPT = ("old_log_probs", "advantage", "group_id")
_SENT = ("input_ids", "completion_mask", *_KEPT)
_BY_TOKEN, _BY_TERM = ("input_ids", "position_ids", "shift_labels"), ("old_log_probs", "advantages", "segment_id")
_COUNTS = ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len")
_OF_ATTENTION = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_max_seqlens")
_SIGN_SECONDS = 1.0  # between signs of a rank that waits for its queue
_OF_SAMPLES = "batch/masked_token_frac"  # others named batch/ are of the rows that TRL packs

Rollout: TypeAlias = dict[str, Any]
Counts: TypeAlias = tuple[float, float, float]
"""Of an update: tokens that train, all tokens, mean tokens of a rollout."""


class AsyncGRPOTrainer(TokenLossMixin, async_grpo.AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with planned steps; see `PlannedTrainerMixin`.

    An update is per_device_train_batch_size x ranks x gradient_accumulation_steps rollouts of any length.
    """

    ref_model = None

    def _problems(self, arguments: Any) -> list[LengthwiseError]:
        problems = self._stages_problems("the first one sends all to the server")
        if (budget := arguments.token_budget or 0) > 0:
            got = f"{budget}, but it drops longer rollouts, and capacity_tokens bounds memory without that"
            problems.append(ConfigError("token_budget", expected="None or 0", got=got, remedy="Remove it."))
        return problems

    def _check_division(self) -> None:
        """Refuse a balance loss of routers: TRL's depends on which rollouts it packs."""
        if self.aux_loss_enabled:
            got = f"{self.router_aux_loss_coef:g}, but TRL counts a prompt once in each pack of rollouts that share it"
            remedy = "Set router_aux_loss_coef to 0."
            raise ConfigError("router_aux_loss_coef", expected="0", got=got, remedy=remedy)

    def _own(self, arguments: Any) -> Any:
        arguments, loading = copy.copy(arguments), copy.copy(arguments.accelerator_config)
        loading.split_batches = loading.dispatch_batches = False  # which TRL sets for the loader that it makes
        arguments.accelerator_config = loading
        arguments = super()._own(arguments)
        arguments.token_budget = 0  # else TRL asks the server for its longest sequence
        return arguments

    def _start_session(self, optimizer: Any) -> Session:
        session = super()._start_session(optimizer)
        if from_first(session.engine.transport, lambda: isinstance(self.rollout_worker, AsyncRolloutWorker)):
            refuse_long_completions(session, self.args.max_completion_length)
        return session

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return the prompts as they are: the worker reads them."""
        return dataset

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse evaluations: TRL's trainer generates for training only."""
        remedy = "Read the rewards that it logs, or save the model and call evaluate of a GRPOTrainer."
        got = "evaluate, which TRL's AsyncGRPOTrainer does not have"
        raise ConfigError("evaluate", expected="train", got=got, remedy=remedy)

    # The queue.

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of updates, the same on all ranks."""
        super().get_train_dataloader()  # makes the reader of the queue
        size = self.args.per_device_train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        rollouts = _Shared(self._rollout_dataset, size, log=self._log_rollouts, share=self._of_first)
        return DataLoader(rollouts, batch_size=None, collate_fn=lambda update: update)

    def _of_first(self, given: Any) -> Any:
        """Return rank 0's value, which must be JSON, on all ranks. Collective."""
        transport = self._trained().engine.transport
        transport.phase = "waiting for rollouts of rank 0's queue"
        return from_first(transport, lambda: given)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the rollouts of the next update as the first of its batches, and their number of trained tokens.

        Raises:
            DataError: no token trains, or a rollout is longer than what the ranks hold.
        """
        self._batches = [next(epoch_iterator), *[Examples(rows=(), num_examples=0)] * (num_batches - 1)]
        limit, rows = self._trained().longest_tokens, self._batches[0].rows
        for row in filter(_trains, rows):
            if (tokens := len(row["input_ids"])) > limit:
                remedy = "Run on more ranks, raise capacity_tokens, or have the worker end rollouts earlier."
                expected, got = f"at most {limit} tokens, what the ranks hold", f"{tokens}"
                raise DataError(f"rollout of group {row['group_id']}", expected=expected, got=got, remedy=remedy)
        if not any(map(_trains, rows)):
            remedy = "Have the worker leave out rollouts whose completion_mask is 0."
            expected, got = "a token that trains in each update", f"none in {len(rows)} rollouts"
            raise DataError("completion_mask", expected=expected, got=got, remedy=remedy)
        return self._batches, self._get_num_items_in_batch(self._batches, device)

    def _log_rollouts(self, samples: list[Rollout]) -> None:
        self._trained_groups.update(each["group_id"] for each in samples)
        found: Any = defaultdict(list)
        packed: Any = SimpleNamespace(samples=samples, tokens=(), load=1)  # a plan packs otherwise
        collator = DataCollatorForRollout(0, metrics=found)
        collator._log_metrics(rows=[packed], all_examples=samples, padded=torch.ones(1))
        for name, values in found.items():
            if not name.startswith("batch/") or name == _OF_SAMPLES:
                self._metrics["train"][name] += values

    # A step.

    def _update(self, normalizer: float) -> tuple[float, StepResult]:
        start, rows = time.perf_counter(), self._batches[0].rows
        places = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
        planned: Any = [
            {"input_ids": row["input_ids"], "labels": row["labels"], SLOTS: _slots(row["labels"], int(first))}
            for row, first in zip(rows, places, strict=False)
            if _trains(row)
        ]
        size, columns, as_sum = int(places[-1]), self._columns(rows), None
        self.current_gradient_accumulation_steps = 1  # the loss is that of the whole update
        if getattr(self.compute_loss, "__func__", None) is async_grpo.AsyncGRPOTrainer.compute_loss:

            def weights_of(numbers: Tensor, own: dict[str, Tensor]) -> Tensor:
                return self._loss(numbers, own, (normalizer, 0.0, 1.0))[1][0]  # else TRL would count its tokens

            expected = "a sum over tokens"
            as_sum = TokenSum(columns=columns, weights_of=weights_of, where="compute_loss", expected=expected)
        counts = (normalizer, float(size), size / len(rows))
        loss, result = self._updated(planned, size, partial(self._loss, columns=columns, counts=counts), as_sum)
        self._step_microbatches, self._step_trained_tokens = len(result.plan.microbatches), normalizer
        self._current_train_step_time += time.perf_counter() - start
        return loss, result

    def _columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return columns of all tokens, (tokens,), with the loss's value for the token that follows."""
        found: dict[str, list[Any]] = defaultdict(list)
        for number, row in enumerate(rows):
            length = len(row["input_ids"])
            found["input_ids"].append(row["input_ids"])
            found["position_ids"].append(np.arange(length))
            found["shift_labels"].append(np.append(row["labels"][1:], NO_LOSS))
            found["old_log_probs"].append(np.append(row["old_log_probs"][1:], 0.0).astype(np.float32))
            found["advantages"].append(np.full(length, row["advantage"], np.float32))
            found["segment_id"].append(np.full(length, number))
        return {name: torch.from_numpy(np.concatenate(each)).to(self.args.device) for name, each in found.items()}

    def _loss(self, numbers: Tensor, columns: Mapping[str, Tensor], counts: Counts) -> tuple[Tensor, Tensor]:
        """Return TRL's loss of some tokens of an update, and its gradient by their numbers, (2, tokens); TRL logs."""
        leaf, terms = numbers.detach().clone().requires_grad_(), (columns["shift_labels"] != NO_LOSS).nonzero()
        # TRL divides by its part of the ranks' tokens; here one rank has all of them.
        given = dict(zip(_COUNTS, (counts[0] * self.accelerator.num_processes, *counts[1:]), strict=True))
        inputs = {name: torch.tensor([value], device=leaf.device) for name, value in given.items()}
        inputs |= {name: columns[name][None] for name in _BY_TOKEN}
        inputs |= {name: columns[name][terms[:, 0]][None] for name in _BY_TERM}
        inputs |= {"token_index": terms.T, "attention_mask": torch.ones_like(inputs["input_ids"])}
        inputs |= dict.fromkeys(_OF_ATTENTION, torch.zeros(1, 2, dtype=torch.long, device=leaf.device))  # which has run
        fields = {name: each[None] for name, each in zip(NUMBERS, leaf, strict=True)}
        answers: Any = Answers(fields, self._new_balance())
        with ungathered(self.accelerator, is_logged=self._is_logged), torch.enable_grad():
            loss = self.compute_loss(answers, inputs)
        (gradient,) = self._gradients(loss, leaf)
        return loss, gradient

    def _log_step_metrics(self) -> None:
        super()._log_step_metrics()
        self._metrics["train"].pop("perf/fwd_s", None)  # of `Answers`

    def _sync_weight(self) -> None:
        with self._trained().whole(on_first=not self._lora_sync):  # TRL saves adapters on every rank
            super()._sync_weight()

    def _streaming_iter(self) -> Any:
        """Yield the weights on rank 0, which sends them; others have none, and no part in a gather."""
        if self.accelerator.is_main_process:
            yield from super()._streaming_iter()


class _Shared(IterableDataset[Examples]):
    """Rollouts of rank 0's queue, `size` at a time, on all ranks.

    reader: TRL's reader, on rank 0. log: callback for the rollouts there. share: collective that returns rank 0's value
    on all ranks, None while it waits for its queue.
    """

    def __init__(
        self, reader: Any, size: int, *, log: Callable[[list[Rollout]], None], share: Callable[[Any], Any]
    ) -> None:
        self._reader, self._size, self._log, self._share = reader, size, log, share
        if reader is not None:
            reader.queue = _Polled(reader.queue, share)

    def __iter__(self) -> Iterator[Examples]:
        """Iterate without end. Collective."""
        read = self._received if self._reader is None else partial(self._sent, iter(self._reader))
        while True:
            yield Examples(rows=tuple(map(_row, read())), num_examples=self._size)

    def _sent(self, reader: Iterator[Rollout]) -> list[Rollout]:
        try:
            samples = list(islice(reader, self._size))
            self._log(samples)
            rows = [{name: np.asarray(each[name]).tolist() for name in _SENT} for each in samples]
        except TransferError:
            raise
        except BaseException as error:  # of the worker, or Ctrl-C; the other ranks wait
            with suppress(TransferError):
                self._share(f"{type(error).__name__}: {error}")
            raise
        return self._share(rows)

    def _received(self) -> list[Rollout]:
        while (found := self._share(None)) is None:
            pass
        if isinstance(found, str):
            raise RankError("rank 0", expected="rollouts", got=found, remedy="See what rank 0 reports.")
        return found


class _Polled:
    """The worker's queue, which TRL reads for some seconds at a time; the other ranks then get a sign of rank 0.

    So they do not run into their timeout while it waits for a rollout.
    """

    def __init__(self, queue: Any, share: Callable[[Any], Any]) -> None:
        self._queue, self._share, self._shared = queue, share, time.monotonic()
        self.qsize = queue.qsize

    def get(self, timeout: float) -> Any:
        """Return a rollout; raise queue.Empty after `timeout` seconds."""
        if time.monotonic() - self._shared >= _SIGN_SECONDS:
            self._share(None)
            self._shared = time.monotonic()
        return self._queue.get(timeout=timeout)


def _row(sample: Rollout) -> Rollout:
    """Return a session's row; tokens outside of the completion have no label."""
    ids = np.asarray(sample["input_ids"])
    labels = np.where(np.asarray(sample["completion_mask"]).astype(bool), ids, NO_LOSS)
    return {"input_ids": ids, "labels": labels, **{name: sample[name] for name in _KEPT}}


def _slots(labels: np.ndarray, first: int) -> np.ndarray:
    """Return the places of a row's predictions, from `first` on; tokens that predict no label add 0 to place 0."""
    return np.where(np.append(labels[1:] != NO_LOSS, False), first + np.arange(len(labels)), 0)


def _trains(row: Mapping[str, Any]) -> bool:
    return bool((row["labels"][1:] != NO_LOSS).any())  # nothing predicts the first token
