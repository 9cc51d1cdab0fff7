"""The training loop of one rank.

A step: run this rank's microbatches (rings), then the step's end, which every rank enters after its last ring transfer
and which alone has collectives: share the numbers, reduce, clip, update, publish, agree on the next plan. Loss and
gradient are refused before an update when they are not finite, the parameters that it left with the next step's
numbers, before an evaluation and at the end: no model is saved that is not finite (`run/not_finite.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lengthwise.comm import Transport, World, agree, join
from lengthwise.config import dump_config
from lengthwise.core.faults import fault
from lengthwise.cost.refit import RanStep
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import SMALLER_STATE, PeakMemory, reporting_shortage
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.engine.schedule import learning_rates
from lengthwise.engine.step import RankResult
from lengthwise.models import DTYPES, has_balance_loss
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.best import BestModel
from lengthwise.run.building import build_trained
from lengthwise.run.callbacks import Callback, call_back
from lengthwise.run.capacity import measure_capacities
from lengthwise.run.checkpoints import Checkpoints
from lengthwise.run.export import write_model
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import MEASURING_SECONDS, Job
from lengthwise.run.launch import StopRequest
from lengthwise.run.metrics import EvalMetrics, FinishedStep, StepMetrics, TrainResult
from lengthwise.run.not_finite import FinitePolicy
from lengthwise.run.pricing import Pricing
from lengthwise.run.resume import Resume, told_resume, torchrun_agent
from lengthwise.run.trackers import Trackers
from lengthwise.run.warmup import check_memory, check_step_end, reporting_update
from lengthwise.session.capacity import told
from lengthwise.session.engine import Engine
from lengthwise.session.source import PlannedStep, StepPlanner


def connect(
    world: World, job: Job, on_phase: Callable[[str], None], say: Callable[[str], None] | None = None
) -> Transport:
    """Join the ranks of the run, and check that all of them read the same run file and data.

    `say` hears which transport it is, and why.

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


def train_rank(job: Job, world: World, callbacks: Sequence[Callback], on_phase: Callable[[str], None]) -> TrainResult:
    """Train to the end, or until asked to stop, and save the model (rank 0).

    Raises:
        NumericError: a loss, a gradient or the parameters are not finite; no model is saved.
    """
    pricing = Pricing(job, corrects=job.measures and not world.rank)
    with nullcontext() if world.rank else PlannerProcess(forks=world.rendezvous is not None) as process:
        folder = RunFolder(
            job.config.output,
            lambda line: call_back(callbacks, "on_note", line),
            most_log_bytes=job.config.most_log_mb * 1e6,
        )
        hearing = () if world.rank else (folder, *callbacks)
        say = partial(call_back, hearing, "on_note")
        transport = connect(world, job, on_phase, None if world.rank else say)

        planner = None if process is None else partial(pricing.plan, process)
        transport.phase = "start, what to go on from"
        with (
            StopRequest(ends_at_the_second=_is_alone(world)).listening() as stop,
            Trackers(job, say) as trackers,
        ):
            hearing = () if world.rank else (*hearing, trackers)
            job = replace(job, resume=told_resume(job.resume, job.config, transport))
            trainer = _Trainer(job, world, transport, planner, hearing, stop, pricing, folder)
            try:
                result = trainer.run()
            finally:
                trainer.close()
            transport.close()
            return result


def _is_alone(world: World) -> bool:
    """Whether nobody else would end this process; a cluster may signal it and torchrun, which signals it again."""
    return world.world_size == 1 and torchrun_agent() is None


class _Trainer:
    def __init__(
        self,
        job: Job,
        world: World,
        transport: Transport,
        planner: StepPlanner | None,
        callbacks: Sequence[Callback],
        stop: StopRequest,
        pricing: Pricing,
        folder: RunFolder,
    ) -> None:
        self._job, self._transport, self._callbacks, self._stop = job, transport, callbacks, stop
        self._pricing, self._folder = pricing, folder
        dtype = DTYPES[job.config.precision]
        self._say = say = partial(call_back, callbacks, "on_note")
        if job.hardware_note is not None:
            say(job.hardware_note)
        if isinstance(job.config.heads, int) and job.config.heads > job.ranks:
            say(f"heads: {job.config.heads} splits nothing on {job.ranks} ranks")
        with reporting_shortage(
            lambda: f"rank {world.rank}, start",
            needs=lambda: "the model, its gradients and its optimizer",
            remedy=SMALLER_STATE,
        ):
            self._model, self._parameters = build_trained(job, world, transport, say=say)
            self._optimizer = ShardedOptimizer(self._parameters, job.config.optimizer, transport)
        self._engine = Engine(
            model=self._model,
            transport=transport,
            planner=planner,
            num_heads=job.num_heads,
            timeout_seconds=job.timeout_seconds,
            computing=job.computing,
            device=world.device,
            dtype=dtype,
            seed=job.config.seed,
            offload=job.config.offload,
            parameters=self._parameters,
        )
        self._kernel = self._engine.kernel(dtype, say)
        self._checkpoints = Checkpoints(
            job.config,
            transport,
            self._parameters,
            self._optimizer,
            data=lambda: job.dataset.digest().hex(),
            note=say,
        )
        self._done = 0  # steps, before the first of this process
        self._finite = FinitePolicy(
            config=job.config,
            transport=transport,
            parameters=self._parameters,
            checkpoints=self._checkpoints,
            callbacks=callbacks,
            largest_allowed=torch.finfo(dtype).max,
        )
        if job.resume is not None:
            self._restore(job.resume)
        if job.config.capacity_tokens == "auto":
            self._job = job = self._measure_capacities()
        if job.measures_at_start:
            self._measure_costs(world)
        self._engine.start_offloading(self._kernel)
        self._checks_memory = job.config.memory_check if job.config.memory_check is not None else job.gpus > 0
        self._memory = PeakMemory()
        self._best: BestModel | None = None  # of rank 0, where the run keeps one
        self._num_steps = job.num_steps
        self._learning_rate = learning_rates(job.config.optimizer, self._num_steps)
        self._steps = self._engine.steps(job.batches(after=self._done))

    def _restore(self, resume: Resume) -> None:
        """Take parameters, states and counts from a checkpoint. Collective."""
        self._finite.skipped = resume.manifest.skipped
        self._checkpoints.restore(resume)
        self._done = resume.step
        for each in resume.passed_over:
            self._say(f"passed over, and removed: {each}")
        self._say(f"going on from {resume.folder}, after step {self._done}")

    def _measure_capacities(self) -> Job:
        """Return the job with what ranks hold, by what fits beside all that is in memory now. Collective."""
        transport, job = self._transport, self._job
        transport.phase = "measuring what fits into memory"
        ranks = transport.device_ranks
        found = measure_capacities(job, self._model, self._parameters, self._kernel, transport, local_ranks=ranks)
        job = job.with_capacities(found)
        self._pricing.plan_for(job)
        self._say(f"capacity of a rank: {told(found, job.most_tokens)}")
        return job

    def _measure_costs(self, world: World) -> None:
        """Price plans by what the machine is measured to take; values and states stay as they are. Collective."""
        self._leave_if_asked("costs")
        self._transport.phase = "measuring before the first step"
        self._say(f"measuring the machine, about {MEASURING_SECONDS:.0f} s")
        self._say(self._pricing.measure(world, self._transport, (self._model, self._parameters, self._optimizer)))

    def _leave_if_asked(self, before: str) -> None:
        """End all ranks where one was asked to stop and nothing was trained yet. Collective."""
        self._transport.phase = f"start, before {before}"
        if self._engine.share([float(self._stop.signal or 0)]).any():
            raise KeyboardInterrupt

    def run(self) -> TrainResult:
        fault("start", self._transport.rank, self._done)
        self._leave_if_asked("the first step")
        if self._transport.rank == 0:
            if self._done:
                self._folder.go_on(self._job.config, self._done)
            else:
                self._folder.start(self._job.config)
            self._folder.note_agent(torchrun_agent())
            if self._job.config.save is not None and self._job.eval_dataset is not None:
                self._best = BestModel(self._folder.path, self._job.eval_dataset.digest().hex(), self._say)
            if self._pricing.measurements is not None:
                self._folder.keep_measurements(self._pricing.measurements)
        if self._checks_memory:
            self._transport.phase = "memory check before the first step"
            said = check_memory(self._model, self._parameters, self._job, self._kernel)
            check_step_end(self._optimizer, self._transport)
            self._say(said)
        start, tokens, metrics, stopped_by = time.perf_counter(), 0, None, None
        first_loss, loss = (None, 0.0) if self._job.resume is None else self._job.resume.losses
        number, planned = self._done, self._steps.next(f"step {self._done + 1}")
        while planned is not None and stopped_by is None:
            number += 1
            ran, planned, stopped_by = self._step(number, planned)
            if ran is not None:
                metrics, tokens, loss = ran, tokens + ran.num_tokens, ran.loss
                first_loss = loss if first_loss is None else first_loss
            self._maybe_evaluate(number)
            is_last = planned is None or stopped_by is not None
            if self._checkpoints.is_due(number, asked=is_last or self._asks_for_checkpoint):
                self._hold_parameters(number)
                skipped = self._finite.skipped
                self._checkpoints.save(number, first_loss=first_loss or 0.0, loss=loss, skipped=skipped)
        self._save(number)
        self._checkpoints.finish()
        return TrainResult(
            steps=number,
            num_tokens=tokens,
            seconds=time.perf_counter() - start,
            first_loss=first_loss or 0.0,
            last_loss=loss,
            metrics=metrics,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            stopped_by=stopped_by,
            folder=self._folder.path,
            skipped=self._finite.skipped,
        )

    def close(self) -> None:
        self._steps.close()
        self._checkpoints.close()
        self._engine.close()

    def _run(self, planned: PlannedStep, name: str, *, step: int = 0, train: bool = True) -> RankResult:
        return self._engine.run(planned, name, step=step, train=train, logits_at_once=self._job.logits_at_once)

    def _step(self, number: int, planned: PlannedStep) -> tuple[StepMetrics | None, PlannedStep | None, int | None]:
        """Run a step; return its metrics, None if it made no update, the next one, and the signal to stop, if any."""
        batch, plan = planned.batch, planned.plan
        start, name = time.perf_counter(), f"step {number}"
        fault("microbatches", self._transport.rank, number)
        work = self._run(planned, name, step=number)
        self._transport.phase = f"{name}, step end"
        fault("step-end", self._transport.rank, number)
        stop = float(self._stop.signal or 0)
        numbers = [work.loss_sum, work.busy_seconds, stop, work.router_loss, self._finite.largest]
        waits = [work.ring_wait_seconds, work.offload_wait_seconds, work.offloaded_bytes]
        saving = [self._checkpoints.progress, self._checkpoints.asks]
        rows = self._engine.share([*numbers, *waits, self._memory.peak_bytes(), *saving])
        self._memory.start()
        self._checkpoints.settle(rows[:, 9])
        self._asks_for_checkpoint = bool(rows[0, 10])
        loss, router_loss = rows[:, 0].sum().item() / batch.loss_weight, rows[:, 3].sum().item()
        lr = self._learning_rate(number)
        is_finite = (
            self._finite.holds_parameters(number - 1, rows[:, 4], within=number)
            and self._finite.holds(number, "loss", loss, batch.ids)
            and self._finite.holds(number, "router loss", router_loss, batch.ids)
        )
        grad_norm = self._update(number, lr, batch) if is_finite else None
        following, stopped_by = self._steps.next(f"step {number + 1}"), int(rows[:, 2].max()) or None
        if grad_norm is None:
            return None, following, stopped_by
        metrics = StepMetrics(
            plan=plan,
            step=number,
            loss=loss,
            router_loss=router_loss if has_balance_loss(self._model.config) else None,
            grad_norm=grad_norm,
            lr=lr,
            num_loss_tokens=batch.loss_tokens,
            busy_seconds=rows[:, 1].tolist(),
            step_seconds=time.perf_counter() - start,
            plan_seconds=planned.plan_seconds,
            predicted_step_seconds=self._pricing.predicted_step_seconds(plan),
            exposed_ring_seconds=rows[:, 5].max().item(),
            offload_wait_seconds=rows[:, 6].max().item(),
            offloaded_bytes=int(rows[:, 7].sum()),
            peak_memory_bytes=int(rows[:, 8].max()),
        )
        busy = tuple(rows[:, 1].tolist())
        if said := self._pricing.observe(RanStep(plan=plan, busy_seconds=busy, step_seconds=metrics.step_seconds)):
            self._say(said)
        finished = FinishedStep(metrics=metrics, num_steps=self._num_steps, sequences=batch.ids, plan=plan)
        call_back(self._callbacks, "on_step", finished)
        return metrics, following, stopped_by

    def _update(self, number: int, lr: float, batch: StepBatch) -> float | None:
        """Reduce, clip, update, publish; return the norm of the gradient, None where that is not finite. Collective."""
        with reporting_update(self._transport):
            grad_norm = self._optimizer.reduce()
            if not self._finite.holds(number, "norm of the gradient", grad_norm, batch.ids):
                return None
            fault("update", self._transport.rank, number)
            self._optimizer.update(lr, grad_norm)
        fault("updated", self._transport.rank, number)
        self._finite.updated(batch.ids)
        return grad_norm

    def _hold_parameters(self, number: int) -> None:
        """See to it, after step `number`, that parameters are finite before they are used or kept. Collective."""
        self._finite.holds_parameters(number, self._engine.share([self._finite.largest])[:, 0])

    def _maybe_evaluate(self, number: int) -> None:
        every = self._job.config.eval
        if every is None or (number % every.every_steps and number != self._num_steps):
            return
        name = f"evaluation after step {number}"
        self._transport.phase = f"{name}, start"
        self._hold_parameters(number)
        loss, loss_weight, loss_tokens, tokens, sequences = 0.0, 0.0, 0, 0, 0
        steps = self._engine.steps(self._job.eval_batches())
        while (planned := steps.next(name)) is not None:
            batch = planned.batch
            work = self._run(planned, name, train=False)
            self._transport.phase = f"{name}, sum"
            loss += self._engine.share([work.loss_sum]).sum().item()
            loss_tokens += batch.loss_tokens
            loss_weight += batch.loss_weight
            tokens, sequences = tokens + sum(batch.lengths), sequences + len(batch.ids)
        steps.close()
        metrics = EvalMetrics(
            step=number,
            loss=loss / loss_weight,
            num_sequences=sequences,
            num_tokens=tokens,
            num_loss_tokens=loss_tokens,
        )
        call_back(self._callbacks, "on_eval", metrics)
        if self._job.config.save is not None:
            self._transport.phase = f"{name}, saving the best model"
            if self._engine.share([float(self._best is not None and self._best.takes(metrics.loss))]).any():
                with self._whole_on_first():
                    if self._best is not None:
                        self._best.offer(number, metrics.loss, partial(self._write_model, number))

    def _save(self, number: int) -> None:
        self._transport.phase = "saving the model"
        self._hold_parameters(number)
        with self._whole_on_first():
            if self._transport.rank == 0:
                self._folder.save_model(partial(self._write_model, number))
                self._folder.finish()

    def _whole_on_first(self) -> AbstractContextManager[None]:
        """See that rank 0's model can be written inside the block. Collective."""
        return self._parameters.whole_on_first(trained_only=self._job.config.lora is not None)

    def _write_model(self, number: int, folder: Path) -> None:
        write_model(self._model, self._job.config, self._job.tokenizer, folder)
        fault("model-save", 0, number)
