"""The training loop of one rank.

A step: run this rank's microbatches (rings), then the step's end, which every rank enters after its last ring transfer
and which alone has collectives: share the numbers, reduce, clip, update, publish, agree on the next plan. Loss and
gradient are refused before an update when they are not finite, the parameters that it left with the next step's
numbers, before an evaluation and at the end: no model is saved that is not finite (`run/not_finite.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from lengthwise.comm import World
from lengthwise.core.faults import fault
from lengthwise.cost.refit import RanStep
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import PeakMemory
from lengthwise.engine.schedule import learning_rates
from lengthwise.models import has_balance_loss
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.building import connect
from lengthwise.run.callbacks import Callback, call_back
from lengthwise.run.evaluating import Evaluation
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job
from lengthwise.run.launch import StopRequest
from lengthwise.run.metrics import FinishedStep, StepMetrics, TrainResult
from lengthwise.run.numbers import metrics_of, numbers_of
from lengthwise.run.pricing import Pricing
from lengthwise.run.resume import told_resume, torchrun_agent
from lengthwise.run.setup import RankRun, set_up
from lengthwise.run.trackers import Trackers
from lengthwise.run.warmup import check_memory, check_step_end, reporting_update
from lengthwise.session.source import PlannedStep


def train_rank(job: Job, world: World, callbacks: Sequence[Callback], on_phase: Callable[[str], None]) -> TrainResult:
    """Train to the end, or until asked to stop, and save the model (rank 0).

    Raises:
        NumericError: a loss, a gradient or the parameters are not finite; no model is saved.
    """
    pricing = Pricing(job, corrects=job.measures and not world.rank)
    with ExitStack() as stack:
        process = None if world.rank else stack.enter_context(PlannerProcess(forks=world.rendezvous is not None))
        planner = None if process is None else partial(pricing.plan, process)
        folder = RunFolder(job.config.output, lambda line: call_back(callbacks, "on_note", line))
        hearing = () if world.rank else (folder, *callbacks)
        say, show = partial(call_back, hearing, "on_note"), partial(call_back, hearing, "on_phase")

        def note_phase(phase: str) -> None:
            on_phase(phase)
            show(phase)

        stack.callback(show, "")
        transport = connect(world, job, note_phase, None if world.rank else say)
        transport.phase = "start, what to go on from"
        stop = StopRequest(ends_at_the_second=_is_alone(world), announces=_is_alone(world))
        stack.enter_context(stop.listening())
        trackers = stack.enter_context(Trackers(job, say))
        hearing = () if world.rank else (*hearing, trackers)
        job = replace(job, resume=told_resume(job.resume, job.config, transport))
        rank = set_up(job, world, transport, planner, hearing, stop, pricing, folder)
        loop = _Loop(rank)
        try:
            result = loop.run()
        finally:
            loop.close()
        transport.close()
        return result


def _is_alone(world: World) -> bool:
    """Whether nobody else would end this process; a cluster may signal it and torchrun, which signals it again."""
    return world.world_size == 1 and torchrun_agent() is None


@dataclass(slots=True)
class _Progress:
    """How far a loop is: the step that was made last, and what was trained in this process."""

    number: int
    first_loss: float | None
    loss: float
    tokens: int = 0
    metrics: StepMetrics | None = None
    stopped_by: int | None = None


class _Loop:
    def __init__(self, rank: RankRun) -> None:
        self._rank, self._engine, self._transport = rank, rank.engine, rank.engine.transport
        self._memory, self._evaluation, self._asks_for_checkpoint = PeakMemory(), Evaluation(rank), False
        self._num_steps = rank.job.num_steps
        self._learning_rate = learning_rates(rank.job.config.optimizer, self._num_steps)
        self._steps = self._engine.steps(rank.job.batches(after=rank.done))

    def run(self) -> TrainResult:
        self._start()
        rank, checkpoints, start = self._rank, self._rank.checkpoints, time.perf_counter()
        first_loss, loss = (None, 0.0) if rank.job.resume is None else rank.job.resume.losses
        done = _Progress(rank.done, first_loss, loss)
        planned = self._steps.next(f"step {rank.done + 1}")
        while planned is not None and done.stopped_by is None:
            done.number += 1
            ran, planned, done.stopped_by = self._step(done.number, planned)
            if ran is not None:
                done.metrics, done.tokens, done.loss = ran, done.tokens + ran.num_tokens, ran.loss
                done.first_loss = ran.loss if done.first_loss is None else done.first_loss
            self._evaluation.after(done.number)
            is_last = planned is None or done.stopped_by is not None
            if checkpoints.is_due(done.number, asked=is_last or self._asks_for_checkpoint):
                rank.hold_parameters(done.number)
                losses = {"first_loss": done.first_loss or 0.0, "loss": done.loss}
                checkpoints.save(done.number, **losses, skipped=rank.finite.skipped)
        self._save(done.number)
        checkpoints.finish()
        return TrainResult(
            steps=done.number,
            num_tokens=done.tokens,
            seconds=time.perf_counter() - start,
            first_loss=done.first_loss or 0.0,
            last_loss=done.loss,
            metrics=done.metrics,
            parameters=self._engine.num_parameters,
            stopped_by=done.stopped_by,
            folder=rank.folder.path,
            skipped=rank.finite.skipped,
        )

    def close(self) -> None:
        self._steps.close()
        self._rank.close()

    def _start(self) -> None:
        """Begin or go on in the run's folder, and check the memory where that is asked for. Collective."""
        rank, job = self._rank, self._rank.job
        fault("start", rank.rank, rank.done)
        rank.leave_if_asked("the first step")
        if not rank.rank:
            if rank.done:
                rank.folder.go_on(job.config, rank.done)
            else:
                rank.folder.start(job.config)
            rank.folder.note_agent(torchrun_agent())
            self._evaluation.start()
            if rank.pricing.measurements is not None:
                rank.folder.keep_measurements(rank.pricing.measurements)
        checks = job.gpus > 0 if job.config.memory_check is None else job.config.memory_check
        if checks and job.config.stages == 1:
            self._transport.phase = "memory check before the first step"
            engine = self._engine
            said = check_memory(engine.model, rank.parameters, job, engine.kernel(engine.dtype))
            check_step_end(rank.optimizer, self._transport)
            rank.say(said)

    def _step(self, number: int, planned: PlannedStep) -> tuple[StepMetrics | None, PlannedStep | None, int | None]:
        """Run a step; return its metrics, None if it made no update, the next one, and the signal to stop, if any."""
        rank, batch, plan = self._rank, planned.batch, planned.plan
        start, name = time.perf_counter(), f"step {number}"
        fault("microbatches", self._transport.rank, number)
        work = self._engine.run(planned, name, step=number, train=True)
        self._transport.phase = f"{name}, step end"
        fault("step-end", self._transport.rank, number)
        ranks = self._engine.share(numbers_of(rank, work, self._memory))
        self._memory.start()
        rank.checkpoints.settle([each.checkpoint_progress for each in ranks])
        self._asks_for_checkpoint = bool(ranks[0].asks_for_checkpoint)
        loss = sum(each.loss_sum for each in ranks) / batch.loss_weight
        router_loss = sum(each.router_loss for each in ranks)
        lr = self._learning_rate(number)
        is_finite = (
            rank.finite.holds_parameters(number - 1, [each.largest for each in ranks], within=number)
            and rank.finite.holds(number, "loss", loss, batch.ids)
            and rank.finite.holds(number, "router loss", router_loss, batch.ids)
        )
        grad_norm = self._update(number, lr, batch) if is_finite else None
        following = self._steps.next(f"step {number + 1}")
        stopped_by = int(max(each.stop_signal for each in ranks)) or None
        if grad_norm is None:
            return None, following, stopped_by
        metrics = metrics_of(
            planned,
            ranks,
            step=number,
            grad_norm=grad_norm,
            lr=lr,
            step_seconds=time.perf_counter() - start,
            predicted_seconds=rank.pricing.predicted_step_seconds(plan),
            has_balance_loss=has_balance_loss(self._engine.config),
        )
        busy = tuple(each.busy_seconds for each in ranks)
        if said := rank.pricing.observe(RanStep(plan=plan, busy_seconds=busy, step_seconds=metrics.step_seconds)):
            rank.say(said)
        finished = FinishedStep(metrics=metrics, num_steps=self._num_steps, sequences=batch.ids, plan=plan)
        call_back(rank.callbacks, "on_step", finished)
        return metrics, following, stopped_by

    def _update(self, number: int, lr: float, batch: StepBatch) -> float | None:
        """Reduce, clip, update, publish; return the norm of the gradient, None where that is not finite. Collective."""
        with reporting_update(self._transport):
            grad_norm = self._rank.optimizer.reduce()
            if not self._rank.finite.holds(number, "norm of the gradient", grad_norm, batch.ids):
                return None
            fault("update", self._transport.rank, number)
            self._rank.optimizer.update(lr, grad_norm)
        fault("updated", self._transport.rank, number)
        self._rank.finite.updated(batch.ids)
        return grad_norm

    def _save(self, number: int) -> None:
        self._transport.phase = "saving the model"
        self._rank.hold_parameters(number)
        with self._rank.whole_on_first():
            if not self._rank.rank:
                self._rank.folder.save_model(partial(self._rank.write_model, number))
                self._rank.folder.finish()
