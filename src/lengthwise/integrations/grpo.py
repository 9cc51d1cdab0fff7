"""TRL's `GRPOTrainer` and `RLOOTrainer` with planned steps.

On each rank TRL generates, scores and normalizes a share of the prompts; every rank then gets the rows of all, as one
batch. Log-probabilities and the update run by a plan over these rows, without padding.

TRL's own loss is a function of two numbers of every token, log-probability and entropy. A step needs its gradient:

- of a sum over tokens, while a microbatch runs: TRL's loss takes the microbatch's tokens for one row, and
  `_weights_of_sum` asks it what a token weighs in the whole loss. After the step TRL's loss of all tokens gives loss
  and metrics, and checks the gradient that was used;
- of any other (ratios of sequences, quantiles, an entropy bonus, RLOO, a loss of your own), after one more forward
  pass by the same plan.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.integrations.accelerators import ungathered
from lengthwise.integrations.arguments import OFF, Refusal
from lengthwise.integrations.rollouts import OF_IMAGES, flat, joined, num_slots, planned_rows, refuse_long_completions
from lengthwise.integrations.token_losses import NUMBERS, OFFLOADING, Answers, TokenLossMixin, TokenSum
from lengthwise.session import Session

_TOKEN_SUMS = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")  # loss types that are sums over tokens
_OLD, _REFERENCE, _RATIO = "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"
_SAMPLING = "sampling_per_token_logps"


class RolloutMixin(TokenLossMixin):
    """Trains on completions that TRL generates and scores, under a plan over those of all ranks."""

    _refused: Mapping[str, Refusal] = {
        "activation_offloading": OFFLOADING,
        "use_transformers_continuous_batching": (OFF, "it would convert the model that the optimizer updates"),
    }

    _held: tuple[Mapping[str, Any], ...] = ()
    """Batches of the update that is not complete."""

    _own_draws: Tensor | None = None
    """The state of this rank's random numbers, while all ranks have that of the first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.use_vllm:  # an engine in this process is made by now, and memory is measured beside it in train()
            generation: Any = self.vllm_generation
            generation.sync_weights = partial(self._send_weights, generation.sync_weights)

    def _problems(self, arguments: Any) -> list[LengthwiseError]:
        return self._stages_problems("generates with all")

    def _start_session(self, optimizer: Any) -> Session:
        for each in self.reward_funcs:
            if isinstance(each, nn.Module):  # this accelerator moves no model; its memory counts, too
                each.to(self.args.device)
        session = super()._start_session(optimizer)
        if getattr(self, "rollout_func", None) is None:
            refuse_long_completions(session, self.max_completion_length)
        return session

    # Its data: texts, which have no rows of tokens before generation.

    def _collator(self, collate: Any) -> Any:
        return collate

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the prompts of the next update's batches."""
        self._batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return self._batches, None

    def _end_updates(self) -> None:
        super()._end_updates()
        self._held = ()  # of an update that a callback or an error cut short

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0, as TRL does: it counts no operations of prompts."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count nothing: TRL counts tokens when it generates."""

    # Generation.

    def _generate(self, prompts: list[Any]) -> Any:
        with nullcontext() if self.use_vllm else self._trained().whole():
            return super()._generate(prompts)

    def _send_weights(self, send: Callable[[], None]) -> None:
        """Send the weights to vLLM by TRL, as TRL also does where an engine in this process wakes up.

        A server gets them from rank 0, an engine in this process from its own rank.
        """
        with self._trained().whole(on_first=self.vllm_mode == "server"):
            send()
        if self._trained().engine.is_cut:
            torch.cuda.empty_cache()  # of whole weights: torch's cache is not free for an engine's own

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        """Return TRL's columns of all ranks' completions, of which each rank made its share."""
        rank, ranks = self.args.process_index, self.args.world_size
        share, rest = divmod(len(inputs), ranks)
        if rest:
            remedy = "Give a number of prompts, times generations, that the ranks divide."
            got = f"{len(inputs)} completions of a batch on {ranks} ranks"
            raise DataError("dataset", expected="as many completions on every rank", got=got, remedy=remedy)
        found = super()._generate_and_score_completions(inputs[rank * share : (rank + 1) * share])
        if ranks > 1:
            found = self._of_all(found)
            self._own_draws = torch.get_rng_state()
            of_first = [self._own_draws]
            broadcast_object_list(of_first)  # TRL shuffles the rows, on all ranks alike
            torch.set_rng_state(of_first[0])
            self._log_sampling(found)
        return found

    def _of_all(self, own: Mapping[str, Any]) -> dict[str, Any]:
        parts = gather_object([_on("cpu", own)])
        return _on(self.args.device, joined(parts))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        found = super()._prepare_inputs(generation_batch)
        if self._own_draws is not None and self.args.process_index:
            torch.set_rng_state(self._own_draws)  # else ranks would sample alike from here on
        self._own_draws = None
        return found

    def _log_sampling(self, batch: Mapping[str, Tensor]) -> None:
        """Log means over the tokens of all ranks, as one process does; TRL's are means of the ranks' means."""
        if _RATIO not in batch:
            return
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        apart = (batch[_OLD] - batch[_SAMPLING]).abs()
        apart = apart[mask & ~apart.isnan()]
        ratios = batch[_RATIO][mask] if batch[_RATIO].shape == mask.shape else batch[_RATIO].flatten()
        kept = self._metrics["train" if self.model.training else "eval"]
        for name, values, kinds in (
            ("sampling_logp_difference", apart, ("mean", "max")),
            ("importance_sampling_ratio", ratios, ("min", "mean", "max")),
        ):
            for kind in kinds:
                value = getattr(values, kind)().item() if values.numel() else 0.0
                kept[f"sampling/{name}/{kind}"][-1] = value

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **how: Any
    ) -> Any:
        """Return log-probabilities of this rank's completions, which all ranks compute by one plan."""
        if isinstance(model, Answers):
            answer = model()
            return answer.log_probs, answer.entropy, answer.aux_loss
        names, columns = ("ids", "mask"), (input_ids, attention_mask)
        own = {f"prompt_{name}": each[:, :-logits_to_keep] for name, each in zip(names, columns, strict=True)}
        own |= {f"completion_{name}": each[:, -logits_to_keep:] for name, each in zip(names, columns, strict=True)}
        own |= {name: how[name] for name in OF_IMAGES if how.get(name) is not None}
        every, rows = self._of_all(own), len(input_ids)
        is_reference = self.ref_model is not None and model is self.ref_model
        session = self._session_of_reference() if is_reference else self._session_of_model()
        called_model = model if is_reference else self.model_wrapped
        found = self._gathered(session, called_model, planned_rows([every]), NUMBERS[:1], num_slots(every))
        first = rows * self.args.process_index
        logps = found["log_probs"].view(every["completion_mask"].shape)
        return logps[first : first + rows, :logits_to_keep], None, None

    # A step.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Run the whole update at its last batch; return its loss, 0 for the others. For streams see the base class."""
        start, loss = time.perf_counter(), 0.0
        self.model.train()
        self._held = (*self._held, self._prepare_inputs(inputs))
        self._step += 1
        if self.accelerator.sync_gradients or inputs is self._batches[-1]:
            batches, self._held = self._held, ()
            rows, size = planned_rows(batches, self.aux_loss_enabled), sum(map(num_slots, batches))
            as_sum = self._as_sum(batches, size) if self._is_sum() else None
            loss, self._last = self._updated(rows, size, partial(self._loss, batches), as_sum)
        self._current_train_step_time += time.perf_counter() - start
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.tensor(loss, device=self.args.device)

    def _is_sum(self) -> bool:
        """Return whether TRL's loss is a sum over tokens, with weights that do not depend on the model."""
        return False

    def _as_sum(self, batches: Sequence[Mapping[str, Any]], size: int) -> TokenSum:
        names = [name for name in (_OLD, _REFERENCE, _RATIO) if name in batches[0]]
        columns = {name: flat(batches, name) for name in ("advantages", *names)}
        columns["weights"] = self._weights_of_sum(batches, size)
        expected = f"the loss {self.loss_type} as a sum over tokens"
        return TokenSum(columns=columns, weights_of=self._weights_of_some, where="loss_type", expected=expected)

    # TRL's loss.

    def _loss(self, batches: Sequence[Mapping[str, Any]], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return TRL's loss of an update's batches, and its gradient by the numbers, (2, tokens); TRL logs metrics."""
        leaf, first, ranks = numbers.detach().clone().requires_grad_(), 0, self.accelerator.num_processes
        losses, balance, ends = list[Tensor](), self._new_balance(), self.accelerator.sync_gradients
        compute_loss: Any = self._compute_loss if self._is_sum() else self.compute_loss
        with ungathered(self.accelerator, is_logged=self._is_logged), self._synchronized(), torch.enable_grad():
            for number, batch in enumerate(batches):
                self.accelerator.gradient_state._set_sync_gradients(ends and number == len(batches) - 1)
                last, shape = first + num_slots(batch), batch["completion_mask"].shape
                fields = {name: each[first:last].view(shape) for name, each in zip(NUMBERS, leaf, strict=True)}
                # TRL divides by its part of the ranks' tokens; here one rank has all of them.
                given = {**batch, **{name: batch[name] * ranks for name in ("num_items_in_batch",) if name in batch}}
                losses.append(compute_loss(Answers(fields, balance), given))
                first = last
        total = torch.stack(losses).sum()
        if self.model.training and self.loss_is_scaled_for_ga is False:  # else TRL has divided it
            total = total / self.current_gradient_accumulation_steps
        (gradient,) = self._gradients(total, leaf)
        return total, gradient

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Restore, after the block, whether this batch ends an update."""
        kept = self.accelerator.sync_gradients
        try:
            yield
        finally:
            self.accelerator.gradient_state._set_sync_gradients(kept)

    def _weights_of_sum(self, batches: Sequence[Mapping[str, Any]], size: int) -> Tensor:
        """Return the weight of each token in TRL's loss, (size,): its gradient at one point, where it is above 0.

        There ratios are 1, log-probabilities 0 and advantages -1: at 1 a `delta` below 1 would clip the gradient.
        """
        units = [{**batch, "advantages": -torch.ones_like(batch["advantages"])} for batch in batches]
        for unit in units:
            unit.pop(_OLD, None)
            if _RATIO in unit:
                unit[_RATIO] = torch.ones_like(unit[_RATIO])
        with self._unlogged():
            device = units[0]["completion_mask"].device
            return self._loss(units, torch.zeros(2, size, dtype=self._wide, device=device))[1][0]

    def _weights_of_some(self, numbers: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient of TRL's loss of all tokens by the log-probabilities of some, (tokens,).

        numbers, columns: numbers (2, tokens) and columns of these tokens, one row for TRL's loss.
        """
        tokens, device = numbers.shape[1], numbers.device
        nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
        ones = torch.ones(1, tokens, dtype=torch.long, device=device)
        row = {"prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": ones, "completion_mask": ones}
        row["num_items_in_batch"] = torch.tensor(float(tokens), device=device)
        row |= {name: each[None] for name, each in columns.items() if name != "weights"}
        return self._loss([row], numbers)[1][0] * columns["weights"] / self._weights_of_sum([row], tokens)

    # Evaluation.

    def _evaluated_batches(self, session: Session, dataloader: Any) -> Iterator[tuple[int, float, float]]:
        """Yield per batch: number of completions, weighted loss, weight (as TRL weighs it)."""
        state, whole = self.accelerator.gradient_state, self.args.eval_batch_size * self.args.world_size
        for prompts in dataloader:
            batch = self._prepare_inputs(prompts)
            rows = planned_rows([batch], self.aux_loss_enabled)
            loss, _ = self._loss([batch], self._numbers(rows, num_slots(batch)))
            # Accelerate cuts the last batch's copies of its loss to the remainder of the data set's prompts.
            weight = state.remainder / whole if state.end_of_dataloader and state.remainder > 0 else 1.0
            yield len(prompts), loss.item() * weight, weight


def _on(device: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in columns.items()}


class GRPOTrainer(RolloutMixin, trl.GRPOTrainer):
    """TRL's `GRPOTrainer` with planned steps; see `PlannedTrainerMixin`."""

    def _is_sum(self) -> bool:
        own = (getattr(each, "__func__", None) for each in (self.compute_loss, self._compute_loss))
        return (
            tuple(own) == (trl.GRPOTrainer.compute_loss, trl.GRPOTrainer._compute_loss)
            and self.loss_type in _TOKEN_SUMS
            and self.importance_sampling_level == "token"
            and self.top_entropy_quantile >= 1.0
            and not self._entropy_bonus_enabled
            and self.off_policy_mask_threshold is None
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = os.path.join(checkpoint or "", "entropy_ctrl_state.json")  # which TRL wrote
        if self.use_adaptive_entropy and checkpoint is not None and os.path.isfile(path):
            with open(path) as file:
                state = json.load(file)
            self.entropy_coef, self._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]


class RLOOTrainer(RolloutMixin, trl.RLOOTrainer):
    """TRL's `RLOOTrainer` with planned steps; see `PlannedTrainerMixin`. Its loss needs one more forward pass."""
