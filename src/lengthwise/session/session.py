"""Planned steps inside a training loop: a user's own, or that of `lengthwise train`.

A step plans its sequences, runs this rank's microbatches and reduces their gradients. In a user's loop
`optimizer.step()` updates this rank's slices, and a hook sends them to all ranks; between steps the model is plain
Hugging Face. All ranks get the same sequences, and call the same methods in the same order.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn

from lengthwise.checkpoint import SliceWriter
from lengthwise.core.errors import short_traceback
from lengthwise.cost.rank_speeds import RanStep
from lengthwise.engine.norm import clip_factor, gradient_norm
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.models import has_own_loss, image_reader, placeholders, whole_model, without_balance_loss
from lengthwise.models.stored_model import StoredModel
from lengthwise.session.agreement import Agreement, SessionStepEnd
from lengthwise.session.keywords import SessionOptions
from lengthwise.session.loop_optimizer import LoopOptimizer
from lengthwise.session.loss_checks import LossCheck, kind_of, objective_of
from lengthwise.session.losses import IN_CHUNKS, OF_USER, ComputeLoss, LossKind, TokenLoss, TokenValues
from lengthwise.session.misuse import check_kinds, refuse_modes
from lengthwise.session.model import can_share_prefixes, refuse_balance
from lengthwise.session.open import Opened, open_session
from lengthwise.session.ranks import SessionRanks
from lengthwise.session.row_batch import Row, RowBatch
from lengthwise.session.runner import StepResult, StepRunner, first_step_sentence, refuse_not_finite
from lengthwise.session.saving import SavedSession
from lengthwise.session.source import PlannedStep, StepsOfIterators
from lengthwise.session.state_folder import Claims, warn_of_left
from lengthwise.session.values import Combine, Per, combined, gather, refuse_dropout


class Session(SavedSession):
    """Plans and runs the steps of a training loop of your own.

    Args:
        model: a Hugging Face causal language model, or peft's LoRA around one, on this rank's device. All ranks get the
            values of rank 0. Or a `StoredModel`, which the session reads: if parameters are sharded, every rank reads
            its own rows.
        optimizer: one that computes each entry by itself, over all trainable parameters. If None, the session only
            evaluates. For a `StoredModel` the values of a run file's section, {"name": "adamw"}: `session.optimizer`
            then has `step(lr)`, which also clears the gradients.
        lengths: tokens of the coming sequences, where known: they decide the layout, the stages and the planner
            `static`, and a longest one that no plan holds is refused.
        batch_tokens: maximum tokens of a global batch, where known.
        capacity_tokens: maximum tokens of a rank in one microbatch; auto measures it by small passes.
        shard: zero1: each rank has all parameters; zero3: each rank keeps its part, and the model has no values between
            steps; hybrid: each rank keeps its part of a node's copy; auto: the fastest that fits, by estimate.
        ranks_per_node: number of ranks that share the parameters under hybrid; by default those that the launcher
            started on one machine.
        stages, virtual: stages of a pipeline, and chunks of layers per stage, as in a run file. Each rank keeps only
            its own layers, with the values of the first replica's ranks.
        recompute: activation checkpointing: none, layer, all_but_attention or elementwise; auto chooses the best for
            each step, or none if capacity_tokens is a number.
        heads: setting of split heads, as in a run file.
        offload: settings of activation offloading, as a run file's section: {"store": "host"}.
        offload_optimizer: True keeps and updates fp32 master weights and the optimizer's states in host memory.
        planner: name of the planner.
        measurements: costs, or a file that `lengthwise profile` wrote; by default estimates for the device.
        precision: "bf16" for mixed precision over fp32 weights, as under torch.autocast; None leaves it to a
            surrounding torch.autocast.
        attention, compile, fused_layers, experts: kernels and forwards of planned steps, as in a run file; outside of
            them the model computes as before.
        overlap: True sums gradients while a rank's last backward runs, if it is in no ring; by default on GPUs only.
        share_prefixes: auto computes a prompt once for all rows of a step that begin with it, where that saves more
            than 5 % of the predicted time, for losses in which tokens without a label do not count; or off.
        device: device of the steps, by default the model's. If parameters are sharded, the model may lie in host
            memory, and on ranks other than 0 on the meta device.
        seed: seed of dropout.
        timeout_seconds: seconds that a rank waits for another.
        ranks: the joined ranks, by default those that the launcher started.

    Raises:
        ConfigError, ModelRefused, Problems: the model, the optimizer or a setting does not work; one message has all
            problems.
        MemoryShortage: capacity_tokens is auto, and 128 tokens do not fit; another session then needs a new optimizer.
    """

    @short_traceback
    def __init__(
        self,
        model: nn.Module | StoredModel,
        optimizer: Any = None,
        *,
        lengths: Sequence[int] = (),
        batch_tokens: int | None = None,
        seed: int = 0,
        timeout_seconds: float = 600.0,
        ranks: SessionRanks | None = None,
        **settings: Unpack[SessionOptions],
    ) -> None:
        self._known_losses, self._iterators = deque[object](maxlen=8), StepsOfIterators()
        self._closing, self._is_closed, self._has_said = ExitStack(), False, False
        self._claims = Claims()
        self._closing.callback(self._claims.release)
        known: dict[str, Any] = {"lengths": lengths, "batch_tokens": batch_tokens, "ranks": ranks}
        known |= {"seed": seed, "timeout_seconds": timeout_seconds, "closing": self._closing}
        try:
            opened = open_session(model, optimizer, settings, **known)
            self.optimizer: Any = optimizer if opened.settings.section is None else opened.optimizer
            self._take(opened)
        except BaseException:
            self._closing.close()
            raise

    def _take(self, opened: Opened) -> None:
        self.settings, self.engine, self.planning = opened.settings, opened.engine, opened.planning
        self.model, self._inner = opened.settings.model, opened.settings.text
        self._transport, planner, self._say = opened.ranks.transport, opened.ranks.planner, opened.ranks.say
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        self.shard = opened.settings.asked.layout(self.world_size)
        config = whole_model(self._inner).config
        reader = image_reader(self._inner) if self.settings.asked.stages == 1 else None
        refused = {token: key for token, key in placeholders(config).items() if reader is None or token != reader.token}
        self._words = {"num_words": opened.settings.num_words, "placeholders": refused, "reader": reader}
        self.runner = StepRunner(engine=self.engine, writer=SliceWriter(self._transport))
        self._closing.callback(self.runner.writer.close)
        self._updates, self._agreement = opened.optimizer, None
        if opened.ranks.is_run:
            return
        if planner is not None:
            weakref.finalize(self, planner.close)  # of a session that nobody closes
        own = opened.optimizer if isinstance(opened.optimizer, LoopOptimizer) else None
        self._agreement = Agreement(self._inner, self._transport, own, self._closing, self.engine)
        if own is not None:
            stages = self.settings.asked.stages
            self.runner.end = SessionStepEnd(updates=own, transport=self._transport, stages=stages)
            own.compare = self._agreement.reach
        if not self.rank:
            writer = self.runner.writer
            weakref.finalize(writer, warn_of_left, writer.under_way)  # of a session that nobody closes

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradient, before clipping."""
        return self.runner.grad_norm

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into a microbatch of a rank, under the recomputation that fits most, for the last loss."""
        return max(self.planning.ahead.capacities.values())

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that fits: on all ranks, or on one rank if the planner cuts no sequences."""
        return self.planning.ahead.longest_tokens

    def expect(self, *, whole_logits: bool) -> None:
        """Plan coming steps for losses of your own (`loss`, `compute_loss`, `values`), or for losses in chunks.

        Raises:
            MemoryShortage: whole logits of 128 tokens do not fit.
        """
        loss = OF_USER if whole_logits else IN_CHUNKS
        self.planning.of(loss)
        self.planning.expects = loss

    @short_traceback
    def backward(
        self,
        sequences: Sequence[Row] | PlannedStep,
        *,
        loss: TokenLoss | None = None,
        compute_loss: ComputeLoss | None = None,
        normalizer: float | None = None,
    ) -> StepResult:
        """Run forward and backward of a global batch, and reduce its gradients. Collective.

        Gradients of several calls add up until `optimizer.step()` or `zero_grad()`.

        Args:
            sequences: rows of the global batch, the same on all ranks, or a step of `batches`.
            loss: function of outputs and tokens that returns a sum over the tokens; by default the model's own loss, or
                the next token's cross entropy.
            compute_loss: function of model and inputs, as Trainer's, that returns this microbatch's share.
            normalizer: divisor of the sums; by default the number of loss tokens of the batch.

        Raises:
            NumericError: loss or gradients are not finite; no update was made.
        """
        how: dict[str, Any] = {"loss": loss, "compute_loss": compute_loss, "normalizer": normalizer}
        trained = self._training("backward", **how)
        start, name = time.perf_counter(), f"step {self.steps + 1}"
        kind = kind_of(loss, compute_loss, is_own=has_own_loss(self._inner))
        planned = self._planned(sequences, name, kind, normalizer=normalizer)
        self.planning.expects = kind
        objective, check = objective_of(self.engine, self.model, planned, known=self._known_losses, **how)
        with trained.collecting():
            result = self.runner.backward(planned, objective, check=check)
        return self._made(result, start)

    @short_traceback
    def backward_by_sequence(
        self,
        sequences: Sequence[Row] | PlannedStep,
        *,
        combine: Combine,
        values: TokenValues | None = None,
        per: Per = "sequence",
    ) -> StepResult:
        """Run forward and backward of a loss that is not a sum over tokens, and reduce its gradients. Collective.

        Args:
            sequences: rows of the global batch, the same on all ranks, or a step of `batches`.
            combine: function that returns the loss. It gets the sums of the values over each sequence, (sequences,
                ...), in the order of `sequences`; with per="token" a list of all values, one (length, ...) a sequence.
                It runs on every rank and must return the same on all.
            values: function of the model's outputs that returns one value per token; by default the log-probability of
                the token's label, 0 without a label.
            per: "sequence" or "token", see `combine`.

        Raises:
            ModelRefused: the model has dropout, so its two passes would differ, or a balance loss of routers.
        """
        trained = self._training("backward_by_sequence", combine=combine, values=values, per=per)
        start, step, kind = time.perf_counter(), self.steps + 1, kind_of(values, None)
        planned = self._planned(sequences, f"step {step}", kind)
        self.planning.expects = kind
        refuse_dropout(self._inner)  # once the ranks agree
        refuse_balance(self._inner, "values")
        found, sums, first = gather(self.engine, planned, values, per, f"step {step}", step=step)
        loss, weights = combined(found.gathered, sums, combine, self.model)
        objective, check = replace(found, weights=weights), LossCheck()
        watched = objective if values is None else check.watched(self.engine, objective)
        with trained.collecting():
            result = self.runner.backward(planned, watched, before=first, loss=loss, check=check)
        return self._made(result, start)

    @short_traceback
    def token_values(self, sequences: Sequence[Row] | PlannedStep, values: TokenValues | None = None) -> list[Tensor]:
        """Return the `values` of all tokens, one tensor (length, ...) a sequence, on every rank. Collective."""
        check_kinds(values=values)
        name = f"values after step {self.steps}"
        planned = self._planned(sequences, name, kind_of(values, None))
        with without_balance_loss(self._inner):
            found, sums, _ = gather(self.engine, planned, values, "token", name, step=self.steps)
        return list(found.gathered.handed_on(sums))

    @short_traceback
    def evaluate(
        self,
        sequences: Sequence[Row] | PlannedStep,
        *,
        loss: TokenLoss | None = None,
        compute_loss: ComputeLoss | None = None,
        normalizer: float | None = None,
    ) -> StepResult:
        """Return the loss of sequences, with the arguments of `backward`, without gradients and dropout. Collective."""
        how: dict[str, Any] = {"loss": loss, "compute_loss": compute_loss, "normalizer": normalizer}
        check_kinds(**how)
        start, name = time.perf_counter(), f"evaluation after step {self.steps}"
        kind = kind_of(loss, compute_loss, is_own=has_own_loss(self._inner))
        planned = self._planned(sequences, name, kind, normalizer=normalizer)
        objective, check = objective_of(self.engine, self.model, planned, known=self._known_losses, **how)
        result = self.runner.evaluate(planned, objective, check=check)
        refuse_not_finite(f"{name}, loss", result.loss)
        return replace(result, step_seconds=time.perf_counter() - start)

    def batches(self, batches: Iterable[Sequence[Row]]) -> Generator[PlannedStep, None, None]:
        """Yield a planned step for each list of sequences, planned while those before it run. Collective.

        Leave the loop and call again with the same iterator to continue at the next step, although later steps were
        already read. A list or a loader begins anew.
        """
        self._refuse_closed()
        check_kinds(batches=batches)
        read = iter(batches)
        start = partial(self.engine.steps, map(partial(RowBatch, **self._words), read))
        with self._iterators.of(read, start) if read is batches else closing(start()) as steps:
            number = self.steps
            while (planned := steps.next(f"step {(number := number + 1)}")) is not None:
                yield planned

    @short_traceback
    def clip_grad_norm_(self, limit: float) -> float:
        """Scale the gradients as torch.nn.utils.clip_grad_norm_ does; return their norm before. Collective.

        The norm includes earlier clips and the loop's own changes of gradients.
        """
        check_kinds(limit=limit)
        trained = self._trained("clip_grad_norm_")
        self._agree(f"clip_grad_norm_ after step {self.steps}", limit=limit)
        norm = gradient_norm(trained.parameters.grad_shard, self._transport)
        trained.scale_gradients(clip_factor(limit, norm))
        return norm

    @short_traceback
    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Replace a loop's own numbers by their sums over the ranks; return them. Collective, between steps."""
        check_kinds(numbers=numbers)
        self._transport.all_reduce(numbers)
        return numbers

    def close(self) -> None:
        """Leave the process group and end the planner; the model keeps its values. Collective."""
        try:
            if not self._is_closed and self._updates is not None and self._updates.has_edited_weights:
                self._agree(f"close after step {self.steps}")
            if not self._is_closed:
                self.runner.writer.finish()
        finally:
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._iterators.close()
        self._closing.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self._end()  # after an error no rank waits for another

    def _training(self, what: str, **given: object) -> SlicedOptimizer:
        """Check a method that trains, and its arguments; return the optimizer on slices."""
        check_kinds(**given)
        refuse_modes(what, self.engine.cast_dtype())
        return self._trained(what)

    def _planned(
        self, sequences: Sequence[Row] | PlannedStep, name: str, loss: LossKind, **numbers: Any
    ) -> PlannedStep:
        """Return a step on which the ranks agree; plan again if its plan does not suit its loss."""
        self._refuse_closed()
        given, planning = sequences, self.planning
        step = given if isinstance(given, PlannedStep) else RowBatch(given, **self._words)
        allows = not planning.shares or can_share_prefixes(self._inner)
        planning.allows = self._agree(name, allows=allows, **{**numbers, "kind of loss": str(loss)})
        if isinstance(step, RowBatch):
            return planning.plan(self.engine, step, name, loss)
        return step if planning.suits(step.plan, loss) else planning.plan(self.engine, step.batch, name, loss)

    def _made(self, result: StepResult, start: float) -> StepResult:
        """Finish a step that trains; print the plan of the first one."""
        result = replace(result, step_seconds=time.perf_counter() - start)
        if not self.rank and result.grad_norm is not None:
            ran = RanStep(plan=result.plan, busy_seconds=result.busy_seconds)
            if note := self.planning.observe(ran):
                self._say(note)
        if not self._has_said and not self.rank and self._agreement is not None:
            self._has_said = True
            print(first_step_sentence(result, self.planning.ahead, on_gpus=self.settings.on_gpus), flush=True)
        return result
