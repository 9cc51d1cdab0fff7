"""The training loop of one rank: the calls of a user's own loop around a session's steps, and what a run does beside.

Each step: `backward`, clip, update and publish, agree on the next plan, report; then perhaps evaluate and checkpoint.
What the ranks decide together at a step's end is `run/step_end.py`. Parameters are checked before an evaluation, a
checkpoint and at the end, too: no model is saved that is not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from lengthwise.comm import World
from lengthwise.core.faults import fault
from lengthwise.cost.rank_speeds import RanStep
from lengthwise.engine.memory import reporting_update
from lengthwise.engine.schedule import learning_rates
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.building import connect
from lengthwise.run.callbacks import Callback, FinishedStep, StepMetrics, TrainResult, call_back
from lengthwise.run.capacity import check_memory, check_step_end
from lengthwise.run.evaluation import Evaluation
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job
from lengthwise.run.launch import StopRequest
from lengthwise.run.pricing import Pricing
from lengthwise.run.resume import shared_resume, torchrun_agent
from lengthwise.run.setup import RankRun, serving_rows, set_up
from lengthwise.run.trackers import Trackers
from lengthwise.session.source import PlannedStep


def train_rank(job: Job, world: World, callbacks: Sequence[Callback], on_phase: Callable[[str], None]) -> TrainResult:
    """Train to the end, or until asked to stop, and save the model (rank 0).

    Raises:
        NumericError: a loss, a gradient or the parameters are not finite; no model is saved.
    """
    pricing = Pricing(job, follows_speeds=job.measures and not world.rank)
    with ExitStack() as ending, ExitStack() as stack:
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
        job = replace(job, resume=shared_resume(job.resume, job.config, transport))
        with serving_rows(job, world, transport, say, ending):
            loop = _Loop(set_up(job, world, transport, planner, hearing, stop, pricing, folder))
            try:
                result = loop.run()
            finally:
                loop.close()
        transport.close()
        if job.config.report_to:
            note_phase("the end of the reports to trackers")
        return result


def _is_alone(world: World) -> bool:
    """Whether nobody else would end this process; a cluster may signal it and torchrun, which signals it again."""
    return world.world_size == 1 and torchrun_agent() is None


@dataclass(slots=True)
class _Progress:
    """What was trained: first and last loss of the run, and what this process did."""

    first_loss: float | None
    loss: float
    tokens: int = 0
    metrics: StepMetrics | None = None
    stopped_by: int | None = None

    def add(self, ran: StepMetrics) -> None:
        self.metrics, self.tokens, self.loss = ran, self.tokens + ran.num_tokens, ran.loss
        self.first_loss = ran.loss if self.first_loss is None else self.first_loss


class _Loop:
    def __init__(self, rank: RankRun) -> None:
        self._rank, self._runner, self._transport = rank, rank.runner, rank.engine.transport
        self._evaluation, self._num_steps = Evaluation(rank), rank.job.num_steps
        self._learning_rate = learning_rates(rank.job.config.optimizer, self._num_steps)
        self._steps = rank.engine.steps(rank.job.batches(after=rank.runner.steps))

    def run(self) -> TrainResult:
        self._start()
        rank, runner, start = self._rank, self._runner, time.perf_counter()
        done = _Progress(*((None, 0.0) if rank.job.resume is None else rank.job.resume.losses))
        planned = self._steps.next(f"step {runner.steps + 1}")
        while planned is not None and done.stopped_by is None:
            position = planned.batch.end
            ran, planned = self._step(planned)
            if ran is not None:
                done.add(ran)
            self._evaluation.after(runner.steps)
            self._transport.phase = f"step {runner.steps}, whether to stop"
            done.stopped_by = int(max(rank.engine.each_rank(rank.stop.signal or 0))) or None
            is_last = planned is None or done.stopped_by is not None
            if rank.end.checkpoints.is_due(runner.steps, asked=is_last or rank.end.asks_for_checkpoint):
                rank.check_parameters()
                losses = {"first_loss": done.first_loss or 0.0, "loss": done.loss}
                skipped = rank.end.finite.skipped
                rank.end.checkpoints.save(runner.steps, **losses, skipped=skipped, position=position)
        self._save()
        rank.end.checkpoints.finish()
        return TrainResult(
            steps=runner.steps,
            num_tokens=done.tokens,
            seconds=time.perf_counter() - start,
            first_loss=done.first_loss or 0.0,
            last_loss=done.loss,
            metrics=done.metrics,
            parameters=rank.engine.num_parameters,
            stopped_by=done.stopped_by,
            folder=rank.folder.path,
            skipped=rank.end.finite.skipped,
        )

    def close(self) -> None:
        self._steps.close()
        self._rank.close()

    def _start(self) -> None:
        """Begin or go on in the run's folder, and check the memory where that is asked for. Collective."""
        rank, job, done = self._rank, self._rank.job, self._runner.steps
        fault("start", rank.rank, done)
        rank.leave_if_asked("the first step")
        if not rank.rank:
            if job.resume is not None:
                rank.folder.go_on(job.config, job.resume)
            else:
                rank.folder.start(job.config)
            rank.folder.note_agent(torchrun_agent())
            self._evaluation.start()
            if rank.pricing.measurements is not None:
                rank.folder.keep_measurements(rank.pricing.measurements)
        checks = job.gpus > 0 if job.config.memory_check is None else job.config.memory_check
        if checks and job.config.stages == 1:
            self._transport.phase = "memory check before the first step"
            said = check_memory(rank.engine.model, rank.parameters, job, rank.engine.kernel(rank.engine.dtype))
            check_step_end(rank.optimizer, self._transport)
            rank.say(said)

    def _step(self, planned: PlannedStep) -> tuple[StepMetrics | None, PlannedStep | None]:
        """Run a step; return its metrics, None if it made no update, and the next one."""
        rank, number, start = self._rank, self._runner.steps + 1, time.perf_counter()
        self._transport.phase = f"step {number}, start"
        fault("microbatches", rank.rank, number)
        result, lr = self._runner.backward(planned), self._learning_rate(number)
        if result.grad_norm is not None:
            self._update(lr)
            rank.end.finite.updated(planned.batch.ids)
        following = self._steps.next(f"step {number + 1}")
        if result.grad_norm is None:
            return None, following
        metrics = rank.end.metrics(
            result,
            step=number,
            lr=lr,
            step_seconds=time.perf_counter() - start,
            predicted_seconds=rank.pricing.predicted_step_seconds(result.plan),
        )
        if said := rank.pricing.observe(RanStep(plan=result.plan, busy_seconds=result.busy_seconds)):
            rank.say(said)
        self._transport.phase = f"step {number}, reports"
        names = {"num_steps": self._num_steps, "sequences": planned.batch.ids, "plan": result.plan}
        call_back(rank.callbacks, "on_step", FinishedStep(metrics=metrics, **names))
        return metrics, following

    def _update(self, lr: float) -> None:
        rank, limit = self._rank, self._rank.job.config.optimizer.max_grad_norm
        fault("update", rank.rank, self._runner.steps)
        with reporting_update(self._transport):
            if limit is not None:
                self._runner.clip_grad_norm_(limit)
            rank.optimizer.step(lr)
        fault("updated", rank.rank, self._runner.steps)

    def _save(self) -> None:
        self._transport.phase = "saving the model"
        self._rank.check_parameters()
        with self._rank.whole_on_first():
            if not self._rank.rank:
                self._rank.folder.save_model(self._rank.write_model)
                self._rank.folder.finish()
