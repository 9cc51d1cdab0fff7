"""The training loop of one rank of a run, on the methods of a session.

A step: `backward`, clip, update and publish, agree on the next plan, report; then perhaps evaluate and save a
checkpoint. `run/step_end.py` has the ranks' common decisions at a step's end. Parameters are checked before every
evaluation, checkpoint and at the end too, so that no model is saved that is not finite.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from lengthwise.core.faults import fault
from lengthwise.engine.norm import clip_factor
from lengthwise.engine.schedule import learning_rates
from lengthwise.engine.shortage import reporting_update
from lengthwise.run.callbacks import FinishedStep, StepMetrics, TrainResult, call_back
from lengthwise.run.evaluation import Evaluation
from lengthwise.run.setup import RankRun, begin
from lengthwise.session import StepResult
from lengthwise.session.source import PlannedStep


@dataclass(slots=True)
class _Progress:
    """Progress of a run: its first and last loss, and the tokens, metrics and stop signal of this process.

    has_trained: True if a step had a learning rate and a gradient above 0.
    """

    first_loss: float | None
    loss: float
    tokens: int = 0
    metrics: StepMetrics | None = None
    stopped_by: int | None = None
    has_trained: bool = False

    def add(self, ran: StepMetrics) -> None:
        self.metrics, self.tokens, self.loss = ran, self.tokens + ran.num_tokens, ran.loss
        self.has_trained |= ran.lr > 0 and ran.grad_norm > 0
        self.first_loss = ran.loss if self.first_loss is None else self.first_loss


def train_steps(run: RankRun) -> TrainResult:
    """Run all steps, with evaluations and checkpoints when they are due; then save the model. Collective."""
    session, checkpoints, start = run.session, run.end.checkpoints, time.perf_counter()
    evaluation, rate = Evaluation(run), learning_rates(run.job.config.optimizer, run.job.num_steps)
    done = _Progress(*((None, 0.0) if run.job.resume is None else run.job.resume.losses))
    steps = session.engine.steps(run.job.batches(after=session.steps))
    try:
        begin(run)
        evaluation.start()
        planned = steps.next(f"step {session.steps + 1}")
        while planned is not None and done.stopped_by is None:
            step, step_start = session.steps + 1, time.perf_counter()
            session.engine.transport.phase = f"step {step}, start"
            fault("microbatches", run.rank, step)
            result = session.backward(planned)
            if result.grad_norm is not None:
                _update(run, planned, result.grad_norm, rate(step))
                run.end.finite.updated(planned.batch.ids)
            ran, planned = planned, steps.next(f"step {step + 1}")
            if result.grad_norm is not None:
                result = replace(result, step_seconds=time.perf_counter() - step_start)
                done.add(_report(run, ran, result, rate(step)))
            evaluation.after(step)
            done.stopped_by = run.stopped_by(f"step {step}, whether to stop")
            is_last = planned is None or done.stopped_by is not None
            if checkpoints.is_due(step, asked=is_last or run.end.asks_for_checkpoint):
                run.check_parameters()
                losses = {"first_loss": done.first_loss or 0.0, "loss": done.loss}
                checkpoints.save(step, **losses, skipped=run.end.finite.skipped, position=ran.batch.end)
    finally:
        steps.close()
    _save(run)
    session.runner.writer.finish()
    return TrainResult(
        steps=session.steps,
        num_tokens=done.tokens,
        seconds=time.perf_counter() - start,
        first_loss=done.first_loss or 0.0,
        last_loss=done.loss,
        metrics=done.metrics,
        parameters=session.engine.num_parameters,
        stopped_by=done.stopped_by,
        folder=run.folder.path,
        skipped=run.end.finite.skipped,
        has_trained=done.has_trained,
    )


def _update(run: RankRun, planned: PlannedStep, norm: float, lr: float) -> None:
    step, limit = run.session.steps, run.job.config.optimizer.max_grad_norm
    fault("update", run.rank, step)
    with reporting_update(run.engine.transport):
        if limit is not None:
            run.optimizer.scale_gradients(clip_factor(limit, norm))
        run.optimizer.step(lr, without=run.unseen(planned.batch))
    fault("updated", run.rank, step)


def _report(run: RankRun, planned: PlannedStep, result: StepResult, lr: float) -> StepMetrics:
    step, predicted = run.session.steps, run.session.planning.predicted_step_seconds(result.plan)
    metrics = run.end.metrics(result, step=step, lr=lr, predicted_seconds=predicted)
    run.engine.transport.phase = f"step {step}, reports"
    finished = FinishedStep(
        metrics=metrics,
        num_steps=run.job.num_steps,
        sequences=planned.batch.ids,
        plan=result.plan,
        is_measured=run.session.planning.slow_ranks is not None,
    )
    call_back(run.callbacks, "on_step", finished)
    return metrics


def _save(run: RankRun) -> None:
    run.engine.transport.phase = "saving the model"
    run.check_parameters()
    with run.session.whole_on_first():
        if not run.rank:
            with run.folder.saving() as unfinished:
                run.write_model(unfinished)
