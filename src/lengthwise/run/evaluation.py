"""Evaluations of a run, and the model with the lowest evaluation loss so far: `model-best` in the output folder.

A better model is written beside it, synced and renamed, so a fault leaves the previous one. Its `evaluation.json` has
step, loss and data, which a resumed run compares with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.config.problems import shown
from lengthwise.core.errors import OutputError
from lengthwise.core.files import parse_json, previous_of, put_back, read_plain, whole_folder
from lengthwise.run.callbacks import EvalMetrics, call_back
from lengthwise.run.folder import BEST, writing

if TYPE_CHECKING:
    from lengthwise.run.setup import RankRun

NOTE = "evaluation.json"
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEvaluation:
    """The best evaluation: its step, its loss, and the digest of the eval data."""

    step: int
    loss: float
    data: str


def read_best(output: Path) -> tuple[Path, BestEvaluation] | None:
    """Return the folder of a run's best model and its evaluation, or None if there is none.

    After a fault between two renames, this is the previous model, in a folder beside the usual one.
    """
    for folder in (output / BEST, previous_of(output / BEST)):
        note = folder / NOTE
        try:
            found, got = note_of(content := read_plain(note)), content.decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found, got = None, error.strerror or str(error)
        if found is None:
            expected, remedy = "the step, loss and data of an evaluation", f"Correct it, or move {folder} elsewhere."
            raise OutputError(str(note), expected=expected, got=shown(got), remedy=remedy)
        return folder, found
    return None


def note_of(content: bytes) -> BestEvaluation | None:
    """Parse an `evaluation.json`; return None if it is damaged."""
    try:
        found: Any = parse_json(content.decode("utf-8"))
        step, loss, data = found["step"], found["loss"], found["data"]
        kinds = type(step) is int and type(loss) in (int, float) and isinstance(data, str)
        return BestEvaluation(step=step, loss=float(loss), data=data) if kinds and math.isfinite(loss) else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


class Evaluation:
    """Evaluates when the run file asks for it, and keeps the best model on rank 0."""

    def __init__(self, rank: RankRun) -> None:
        self._rank, self._num_steps = rank, rank.job.num_steps
        self._best: BestModel | None = None

    def start(self) -> None:
        """Find the best model so far, on rank 0."""
        job = self._rank.job
        if not self._rank.rank and job.config.save is not None and job.eval_dataset is not None:
            self._best = BestModel(self._rank.folder.path, job.eval_dataset.digest().hex(), self._rank.say)

    def after(self, number: int) -> None:
        """Evaluate after step `number` if an evaluation is due, and keep the model if it is the best. Collective."""
        settings = self._rank.job.config.eval
        if settings is None or (number % settings.every_steps and number != self._num_steps):
            return
        name = f"evaluation after step {number}"
        self._rank.engine.transport.phase = f"{name}, start"
        self._rank.check_parameters()
        metrics = self._evaluate(number, name)
        call_back(self._rank.callbacks, "on_eval", metrics)
        if self._rank.job.config.save is not None:
            self._keep_if_best(metrics, name)

    def _evaluate(self, number: int, name: str) -> EvalMetrics:
        session = self._rank.session
        loss, loss_weight, loss_tokens, tokens, sequences = 0.0, 0.0, 0, 0, 0
        steps = session.engine.steps(self._rank.job.eval_batches())
        while (planned := steps.next(name)) is not None:
            batch = planned.batch
            loss += session.evaluate(planned, normalizer=1.0).loss
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
            with self._rank.session.whole_on_first():
                if self._best is not None:
                    self._best.offer(metrics.step, metrics.loss, self._rank.write_model)


class BestModel:
    """Keeps the model with the lowest evaluation loss, in one process. data: digest of the eval data."""

    def __init__(self, output: Path, data: str, note: Callable[[str], None]) -> None:
        self._folder, self._data, self._note, self._failures = output / BEST, data, note, 0
        with writing(output):
            put_back(self._folder)
        found = read_best(output)
        self._best: BestEvaluation | None = None if found is None else found[1]
        if self._best is not None and self._best.data != data:
            note(f"{self._folder} was evaluated on other data: the next evaluation replaces it")
            self._best = None

    def takes(self, loss: float) -> bool:
        """Return whether this loss is lower than all earlier ones."""
        return math.isfinite(loss) and (self._best is None or loss < self._best.loss)

    def offer(self, step: int, loss: float, write: Callable[[Path], None]) -> None:
        """If this loss is lower than all earlier ones, replace the folder by what `write` writes.

        Raises OutputError at the third consecutive model that cannot be written.
        """
        if not self.takes(loss):
            return
        now = BestEvaluation(step=step, loss=loss, data=self._data)
        try:
            with writing(self._folder.parent), whole_folder(self._folder, replaces=True) as folder:
                write(folder)
                (folder / NOTE).write_text(json.dumps(asdict(now)) + "\n", encoding="utf-8")
        except OutputError as error:
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise
            self._note(f"the best model is not saved: {error}")
        else:
            self._best, self._failures = now, 0
            self._note(f"the best evaluation so far, loss {loss:.4f} after step {step}: {self._folder}")
