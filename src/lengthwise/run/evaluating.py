"""Evaluations of a run, and the model of the best one."""

from __future__ import annotations

from lengthwise.run.best import BestModel
from lengthwise.run.callbacks import call_back
from lengthwise.run.metrics import EvalMetrics
from lengthwise.run.setup import RankRun


class Evaluation:
    """Evaluates where the run file says so. best: of rank 0, where the run keeps one."""

    def __init__(self, rank: RankRun) -> None:
        self._rank, self._num_steps = rank, rank.job.num_steps
        self._best: BestModel | None = None

    def start(self) -> None:
        """Find the best model of before, which a run that goes on has to beat; on rank 0."""
        job = self._rank.job
        if job.config.save is not None and job.eval_dataset is not None:
            self._best = BestModel(self._rank.folder.path, job.eval_dataset.digest().hex(), self._rank.say)

    def after(self, number: int) -> None:
        """Evaluate after step `number`, where it is time to, and keep the model if it is the best. Collective."""
        asked = self._rank.job.config.eval
        if asked is None or (number % asked.every_steps and number != self._num_steps):
            return
        name = f"evaluation after step {number}"
        self._rank.engine.transport.phase = f"{name}, start"
        self._rank.hold_parameters()
        metrics = self._evaluate(number, name)
        call_back(self._rank.callbacks, "on_eval", metrics)
        if self._rank.job.config.save is not None:
            self._keep_if_best(metrics, name)

    def _evaluate(self, number: int, name: str) -> EvalMetrics:
        engine, runner = self._rank.engine, self._rank.runner
        loss, loss_weight, loss_tokens, tokens, sequences = 0.0, 0.0, 0, 0, 0
        steps = engine.steps(self._rank.job.eval_batches())
        while (planned := steps.next(name)) is not None:
            batch = planned.batch
            loss += runner.evaluate(planned, engine.next_token(batch, divisor=1.0)).loss
            loss_tokens += batch.loss_tokens
            loss_weight += batch.loss_weight
            tokens, sequences = tokens + sum(batch.lengths), sequences + len(batch.ids)
        steps.close()
        return EvalMetrics(
            step=number,
            loss=loss / loss_weight,
            num_sequences=sequences,
            num_tokens=tokens,
            num_loss_tokens=loss_tokens,
        )

    def _keep_if_best(self, metrics: EvalMetrics, name: str) -> None:
        self._rank.engine.transport.phase = f"{name}, saving the best model"
        if any(self._rank.engine.each_rank(self._best is not None and self._best.takes(metrics.loss))):
            with self._rank.whole_on_first():
                if self._best is not None:
                    self._best.offer(metrics.step, metrics.loss, self._rank.write_model)
