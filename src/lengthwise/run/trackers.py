"""Reports of a run to experiment trackers, through the callbacks of transformers.

They are called in the loop of rank 0, as by transformers' Trainer, so the run waits for a slow one. One that raises is
named once and not called again. They start with the first report, so that the processes that a run forks do not inherit
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from lengthwise.run.callbacks import Callback, EvalMetrics, FinishedStep, StepMetrics

if TYPE_CHECKING:
    from lengthwise.run.job import Job

TENSORBOARD = "tensorboard"  # within the output of a run


class Trackers(Callback):
    """Reports steps and evaluations to the trackers of `report_to`. say: prints a tracker's first failure."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._open = dict[str, _Tracker]()
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
        for name, tracker in list(self._open.items()):
            with self._leaving_out(name):
                tracker.end(failed=kind is not None)

    def _report(self, step: int, logs: Mapping[str, float]) -> None:
        if not self._has_begun:
            self._has_begun = True
            for name in self._job.config.report_to:
                with self._leaving_out(name):
                    self._open[name] = _Tracker(name, self._job, first_step=step)
        for name, tracker in list(self._open.items()):
            with self._leaving_out(name):
                tracker.log(step, logs)

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """Stop reporting to a tracker if it raises inside the block."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - training continues after any error
            self._open.pop(name, None)
            got = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"no more reports to {name}: {got}; training is not affected")


def step_logs(metrics: StepMetrics) -> dict[str, float]:
    """Return the reported metrics of a step; loss, norm and learning rate by the names of transformers' Trainer."""
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
    """The fields of `TrainingArguments` that trackers of transformers read; the class itself needs accelerate.

    settings: shown with the run. Trackio's space is read from its own environment variables.
    """

    output_dir: str
    settings: Mapping[str, Any]
    run_name: str | None = None
    project: str = field(default_factory=lambda: os.environ.get("TRACKIO_PROJECT", "lengthwise"))
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


class _Tracker:
    """A callback of transformers, called as by their Trainer."""

    def __init__(self, name: str, job: Job, *, first_step: int) -> None:
        from transformers import TrainerControl, TrainerState

        config = job.config
        settings = config.model_dump(mode="json")
        self._arguments = RunArguments(
            output_dir=str(config.output),
            settings=settings,
            run_name=config.output.name if name == "trackio" else None,  # others name runs by their own variables
        )
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
    writer = SummaryWriter(str(folder), purge_step=first_step)  # drops steps that the run repeats
    return INTEGRATION_TO_CALLBACK[name](writer)


def _wandb_finish() -> Callable[..., None] | None:
    """Return wandb's function that ends a run, or None if wandb was running before; its callback leaves it open."""
    import wandb  # pyright: ignore[reportMissingImports]

    return wandb.finish if wandb.run is None else None
