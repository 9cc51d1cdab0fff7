"""Reports of a run to experiment trackers, through the callbacks of transformers that their users know.

Each tracker has a thread of its own in the process of rank 0, which takes reports from a queue: one that is slow,
hangs or fails costs training nothing. What went wrong is printed once, and that tracker is called no more. Threads
start with the first report, when all other processes of the run are there; the end of a run waits some seconds.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from lengthwise.run.callbacks import Callback, EvalMetrics, FinishedStep, StepMetrics

if TYPE_CHECKING:
    from lengthwise.run.job import Job

TENSORBOARD = "tensorboard"  # within the output of a run
PATIENCE_SECONDS = 60.0  # without an answer, after which a tracker counts as hanging; that the end waits at most
_FAILED_SECONDS = 5.0  # that the end of a run waits which ended with an error
_MOST_WAITING = 10_000  # reports


class Trackers(Callback):
    """Reports steps and evaluations to the trackers of `report_to`; `say` prints what is wrong with one, once.

    Methods are called by one thread.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._open: list[_Tracker] = []
        self._has_begun = False

    def on_step(self, step: FinishedStep) -> None:
        """Report a finished step."""
        self._report(step.metrics.step, step_logs(step.metrics))

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Report a finished evaluation."""
        self._report(metrics.step, {"eval_loss": metrics.loss})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        deadline = time.monotonic() + (PATIENCE_SECONDS if kind is None else _FAILED_SECONDS)
        for tracker in self._open:
            tracker.end(failed=kind is not None)
        for tracker in self._open:
            tracker.join(max(0.0, deadline - time.monotonic()))
            if tracker.is_alive():
                tracker.problem = tracker.problem or "it did not accept all reports before the run ended"
        self._tell()

    def _report(self, step: int, logs: Mapping[str, float]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._open = [_Tracker(name, self._job, first_step=step) for name in self._job.config.report_to]
            for tracker in self._open:
                tracker.start()
        for tracker in self._open:
            tracker.put(step, logs)
        self._tell()

    def _tell(self) -> None:
        """Say what is wrong with trackers, and leave these out from now on."""
        failed = [tracker for tracker in self._open if tracker.problem is not None]
        for tracker in failed:
            self._open.remove(tracker)
            self._say(f"no more reports to {tracker.name}: {tracker.problem}; training is not affected")


def step_logs(metrics: StepMetrics) -> dict[str, float]:
    """Return what is reported of a step: loss, norm and learning rate by the names of transformers' Trainer."""
    return {
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.lr,
        "tokens_per_second": metrics.tokens_per_second,
        "imbalance_ratio": metrics.imbalance_ratio,
        "step_seconds": metrics.step_seconds,
        "peak_memory_bytes": metrics.peak_memory_bytes,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """What trackers of transformers read of a `TrainingArguments`, which would ask for accelerate.

    `settings` are shown with the run. Trackio's place is read from its own variables of the environment.
    """

    output_dir: str
    settings: Mapping[str, Any]
    run_name: str | None = None
    project: str = field(default_factory=lambda: os.environ.get("TRACKIO_PROJECT", "huggingface"))
    trackio_space_id: str | None = field(default_factory=lambda: os.environ.get("TRACKIO_SPACE_ID"))
    trackio_bucket_id: str | None = None
    trackio_static_space_id: bool = False  # nothing is published at the end
    hub_private_repo: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of the run."""
        return dict(self.settings)

    def to_json_string(self) -> str:
        """Return the settings of the run as JSON."""
        return json.dumps(self.settings, indent=2)


class _Tracker(threading.Thread):
    """One tracker. `problem`: what ended its reports, None: nothing did."""

    def __init__(self, name: str, job: Job, *, first_step: int) -> None:
        super().__init__(name=name, daemon=True)
        self._job, self._first_step = job, first_step
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | bool] = queue.Queue()
        self._busy_since: float | None = None
        self.problem: str | None = None

    def put(self, step: int, logs: Mapping[str, float]) -> None:
        """Hand a report over, and note where the tracker hangs."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > PATIENCE_SECONDS:
            self.problem = self.problem or f"it has not answered for {PATIENCE_SECONDS:.0f} s"
        elif self._waiting.qsize() >= _MOST_WAITING:
            self.problem = self.problem or f"it is {_MOST_WAITING:,} steps behind"
        else:
            self._waiting.put((step, logs))

    def end(self, *, failed: bool) -> None:
        """Hand over that there will be no more."""
        self._waiting.put(failed)

    def run(self) -> None:
        """Take reports until the end, or until one fails."""
        try:
            self._busy_since = time.monotonic()
            reports = _Reports(self.name, self._job, self._first_step)
            while True:
                self._busy_since = None
                report = self._waiting.get()
                self._busy_since = time.monotonic()
                if isinstance(report, bool):
                    reports.end(failed=report)
                    return
                reports.log(*report)
        except BaseException as error:  # noqa: BLE001 - whatever it is, training goes on
            self.problem = " ".join(f"{type(error).__name__}: {error}".split())


class _Reports:
    """A callback of transformers, called as their Trainer would."""

    def __init__(self, name: str, job: Job, first_step: int) -> None:
        from transformers import TrainerControl, TrainerState

        config = job.config
        settings = config.model_dump(mode="json")
        self._arguments = RunArguments(output_dir=str(config.output), settings=settings)
        self._state = TrainerState(max_steps=job.num_steps, global_step=first_step - 1)
        self._control = TrainerControl()
        self._model = SimpleNamespace(config=job.model.config)
        self._callback = _callback_of(name, config.output / TENSORBOARD, first_step)
        self._finish = _wandb_finish() if name == "wandb" else None
        self._callback.on_train_begin(self._arguments, self._state, self._control, model=self._model)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        self._state.global_step = step
        self._callback.on_log(self._arguments, self._state, self._control, model=self._model, logs=dict(logs))

    def end(self, *, failed: bool) -> None:
        self._callback.on_train_end(self._arguments, self._state, self._control, model=self._model)
        if self._finish is not None:
            self._finish(exit_code=int(failed))


def _callback_of(name: str, tensorboard: Path, first_step: int) -> Any:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if name != "tensorboard":
        return INTEGRATION_TO_CALLBACK[name]()
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", tensorboard)).expanduser()
    return INTEGRATION_TO_CALLBACK[name](
        SummaryWriter(str(folder), purge_step=first_step)
    )  # of steps that are made again


def _wandb_finish() -> Callable[..., None] | None:
    """Return what ends a run of wandb, which its callback leaves to the end of Python; None: it began before ours."""
    import wandb  # pyright: ignore[reportMissingImports]

    return wandb.finish if wandb.run is None else None
