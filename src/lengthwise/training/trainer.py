"""The training loop of one rank.

A step: run this rank's microbatches (rings), then the step's end, which every rank enters after its last ring transfer:
share the numbers, reduce, clip, update, publish, agree on the next plan. Collectives live in the step's end only.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lengthwise.attention import choose_kernel
from lengthwise.comm import Transport, World, agree, join
from lengthwise.config import dump_config
from lengthwise.core.errors import NumericError
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import SMALLER_STATE, telling_memory
from lengthwise.engine.optimizer import ShardedAdamW
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import Work, run_plan
from lengthwise.models import (
    DTYPES,
    build_adapted,
    has_balance_loss,
    largest_head_dim,
    save_adapter,
    save_model,
)
from lengthwise.training.folder import RunFolder
from lengthwise.training.job import Job
from lengthwise.training.launch import StopRequest
from lengthwise.training.metrics import StepMetrics, step_metrics
from lengthwise.training.planner_process import PlannerProcess
from lengthwise.training.planning import PlanAhead, PlannedStep
from lengthwise.training.schedule import learning_rate
from lengthwise.training.warmup import check_memory


class Progress(Protocol):
    """Who is told how the run goes; called on rank 0 only."""

    def note(self, line: str) -> None:
        """Hear what was decided, and why: kernel, transport, what the memory check found."""
        ...

    def step(self, metrics: StepMetrics, num_steps: int) -> None:
        """Hear of a finished step."""
        ...

    def evaluated(self, step: int, loss: float, num_tokens: int) -> None:
        """Hear of a finished evaluation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. `stopped_by` is the signal that ended it early, or None."""

    steps: int
    num_tokens: int
    seconds: float
    first_loss: float
    last_loss: float
    parameters: int
    stopped_by: int | None


def connect(
    world: World, job: Job, on_phase: Callable[[str], None], say: Callable[[str], None] | None = None
) -> Transport:
    """Join the ranks of the run, and check that all of them read the same run file and data.

    `say` is told which transport it is, and why.

    Raises:
        RankError: they did not.
    """
    transport = join(world, timeout_seconds=job.timeout_seconds, on_phase=on_phase, say=say)
    if world.world_size == 1:
        return transport
    data = hashlib.sha256(dump_config(job.config).encode())
    for dataset in filter(None, (job.dataset, job.eval_dataset)):
        data.update(dataset.digest())
    agree(transport, data.digest(), "run file and data")
    return transport


def train_rank(job: Job, world: World, progress: Progress, on_phase: Callable[[str], None]) -> TrainResult:
    """Train to the end, or until asked to stop, and save the model (rank 0)."""
    with nullcontext() if world.rank else PlannerProcess(job.plan_options) as planner:
        transport = connect(world, job, on_phase, None if world.rank else progress.note)
        with StopRequest(ends_at_the_second=world.world_size == 1).listening() as stop:
            trainer = _Trainer(job, world, transport, planner, progress, stop)
            try:
                result = trainer.run()
            finally:
                trainer.close()
            transport.close()
            return result


class _Trainer:
    def __init__(
        self,
        job: Job,
        world: World,
        transport: Transport,
        planner: PlannerProcess | None,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self._job, self._transport, self._planner, self._progress, self._stop = job, transport, planner, progress, stop
        self._folder = RunFolder(job.config.output)
        dtype = DTYPES[job.config.precision]
        self._kernel = choose_kernel(
            world.device,
            dtype=dtype,
            head_dim=largest_head_dim(job.model.config),
            say=None if world.rank else progress.note,
        )
        with telling_memory(
            lambda: f"rank {world.rank}, start",
            needs=lambda: "the model, its gradients and its optimizer",
            remedy=SMALLER_STATE,
        ):
            self._model: Any = build_adapted(job.model, job.config.lora, seed=job.config.seed).to(world.device)
            self._flat = FlatParameters(self._model, transport, dtype=dtype)
            self._optimizer = ShardedAdamW(self._flat, job.config.optimizer, transport)
        self._checks_memory = job.config.memory_check if job.config.memory_check is not None else job.gpus > 0
        self._num_steps = job.num_steps
        self._plans = self._plan_ahead(job.batches())

    def run(self) -> TrainResult:
        if self._transport.rank == 0:
            self._folder.start(self._job.config)
        self._maybe_check_memory()
        start, tokens, losses = time.perf_counter(), 0, []
        number, taken, stopped_by = 1, self._plans.take("step 1"), None
        while taken is not None and stopped_by is None:
            metrics, taken, stopped_by = self._step(number, taken)
            tokens, losses = tokens + metrics.num_tokens, [*losses[:1], metrics.loss]
            self._maybe_evaluate(number)
            number += 1
        self._save()
        return TrainResult(
            steps=number - 1,
            num_tokens=tokens,
            seconds=time.perf_counter() - start,
            first_loss=losses[0],
            last_loss=losses[-1],
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            stopped_by=stopped_by,
        )

    def close(self) -> None:
        self._plans.close()

    def _plan_ahead(self, batches: Iterator[StepBatch]) -> PlanAhead:
        return PlanAhead(batches, self._planner, self._transport, timeout_seconds=self._job.timeout_seconds)

    def _step(self, number: int, planned: PlannedStep) -> tuple[StepMetrics, PlannedStep | None, int | None]:
        batch, plan = planned.batch, planned.plan
        start, name, config = time.perf_counter(), f"step {number}", self._job.config.optimizer
        work = run_plan(self._model, plan, batch, self._transport, self._kernel, name=name)
        self._transport.phase = f"{name}, step end"
        rows = self._share([work.loss_sum, work.busy_seconds, float(self._stop.signal or 0), work.router_loss])
        loss, router_loss = rows[:, 0].sum().item() / batch.loss_tokens, rows[:, 3].sum().item()
        _refuse_infinite("loss", loss, name, batch)
        _refuse_infinite("router loss", router_loss, name, batch)
        lr = learning_rate(
            number,
            peak=config.lr,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            num_steps=self._num_steps,
        )
        grad_norm = self._optimizer.reduce()
        _refuse_infinite("norm of the gradient", grad_norm, name, batch)
        self._optimizer.update(lr, grad_norm)
        taken = self._plans.take(f"step {number + 1}")
        metrics = step_metrics(
            plan,
            step=number,
            loss=loss,
            router_loss=router_loss if has_balance_loss(self._model.config) else None,
            grad_norm=grad_norm,
            lr=lr,
            num_loss_tokens=batch.loss_tokens,
            busy_seconds=rows[:, 1].tolist(),
            step_seconds=time.perf_counter() - start,
            plan_seconds=planned.plan_seconds,
        )
        if self._transport.rank == 0:
            self._folder.write_step(metrics, batch.ids, plan)
            self._progress.step(metrics, self._num_steps)
        return metrics, taken, int(rows[:, 2].max()) or None

    def _share(self, numbers: list[float]) -> torch.Tensor:
        """Return the numbers of all ranks, (ranks, numbers), in fp64."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = torch.empty(self._transport.world_size * len(numbers), dtype=torch.float64)
        self._transport.all_gather(rows, mine)
        return rows.view(self._transport.world_size, len(numbers))

    def _maybe_check_memory(self) -> None:
        if not self._checks_memory:
            return
        self._transport.phase = "memory check before the first step"
        found = check_memory(self._model, self._flat, self._job, self._kernel)
        if self._transport.rank == 0:
            self._progress.note(found)

    def _maybe_evaluate(self, number: int) -> None:
        every = self._job.config.eval
        if every is None or (number % every.every_steps and number != self._num_steps):
            return
        loss, loss_tokens, tokens, sequences = 0.0, 0, 0, 0
        plans = self._plan_ahead(self._job.eval_batches())
        name = f"evaluation after step {number}"
        while (taken := plans.take(name)) is not None:
            batch, plan = taken.batch, taken.plan
            work: Work = run_plan(self._model, plan, batch, self._transport, self._kernel, name=name, train=False)
            self._transport.phase = f"{name}, sum"
            loss += self._share([work.loss_sum]).sum().item()
            loss_tokens += batch.loss_tokens
            tokens, sequences = tokens + sum(batch.lengths), sequences + len(batch.ids)
        plans.close()
        if self._transport.rank == 0:
            row = {"step": number, "loss": loss / loss_tokens, "num_sequences": sequences, "num_tokens": tokens}
            self._folder.write_eval({**row, "num_loss_tokens": loss_tokens})
            self._progress.evaluated(number, loss / loss_tokens, tokens)

    def _save(self) -> None:
        self._transport.phase = "saving the model"
        if self._transport.rank == 0:
            with self._folder.writing():
                save = save_model if self._job.config.lora is None else save_adapter
                save(self._model, self._folder.model)
                if self._job.tokenizer is not None:
                    self._job.tokenizer.save(self._folder.model)


def _refuse_infinite(what: str, value: float, step: str, batch: StepBatch) -> None:
    """Stop before an update that would spoil the model.

    Raises:
        NumericError: `value` is not finite; names the step and its sequences.
    """
    if math.isfinite(value):
        return
    raise NumericError(
        step,
        expected=f"a finite {what}",
        got=f"{value} over sequences {', '.join(map(str, batch.ids[:20]))}{' ...' * (len(batch.ids) > 20)}",
        remedy="Lower optimizer.lr, or look at these sequences. No update was made.",
    )
