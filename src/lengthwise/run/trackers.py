"""Reports of a run to experiment trackers, through the callbacks of transformers.

Rank 0 calls them in its loop, as transformers' Trainer does, so the run waits for a slow one. A tracker that raises is
named once and not called again. Trackers start with the first report, so that forked processes do not inherit them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from lengthwise.run.callbacks import Callback, EvalMetrics, FinishedStep

if TYPE_CHECKING:
    from lengthwise.run.job import Job

TENSORBOARD = "tensorboard"  # within the output of a run
# Reported metrics of a step, by the names of transformers' Trainer where it has them.
_LOGS = {name: name for name in ("loss", "grad_norm", "tokens_per_second", "imbalance_ratio", "step_seconds")}
_LOGS |= {"lr": "learning_rate", "peak_memory_bytes": "peak_memory_bytes"}


class Trackers(Callback):
    """Reports steps and evaluations to the trackers of `report_to`. say: function for a line on a tracker's failure."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._open: dict[str, _Tracker] | None = None  # None before the first report

    def on_step(self, step: FinishedStep) -> None:
        """Report a finished step."""
        self._report(step.metrics.step, {ours: getattr(step.metrics, name) for name, ours in _LOGS.items()})

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Report a finished evaluation."""
        self._report(metrics.step, {"eval_loss": metrics.loss})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._call("on_train_end", failed=kind is not None)

    def _report(self, step: int, logs: Mapping[str, float]) -> None:
        if self._open is None:
            self._open = {name: _Tracker(name, self._job, step) for name in self._job.config.report_to}
            self._call("on_train_begin", step=step - 1)
        self._call("on_log", step=step, logs=dict(logs))

    def _call(self, event: str, **given: Any) -> None:
        open_now = {} if self._open is None else self._open
        for name, call in list(open_now.items()):
            try:
                call(event, **given)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - training continues after any error
                del open_now[name]
                got = " ".join(f"{type(error).__name__}: {error}".split())
                self._say(f"no more reports to {name}: {got}; training is not affected")


class _Tracker:
    """Calls a callback of transformers, which the first call makes, as their Trainer does."""

    def __init__(self, name: str, job: Job, first_step: int) -> None:
        from transformers import TrainerControl, TrainerState

        self._name, self._output, self._first_step = name, job.config.output, first_step
        settings = job.config.model_dump(mode="json")
        self._arguments = SimpleNamespace(  # what callbacks read of TrainingArguments, which needs accelerate
            output_dir=str(self._output),
            run_name=None,
            project=os.environ.get("TRACKIO_PROJECT", "lengthwise"),
            trackio_space_id=os.environ.get("TRACKIO_SPACE_ID"),
            trackio_bucket_id=None,
            trackio_static_space_id=False,  # publishes nothing at the end
            hub_private_repo=None,
            to_dict=lambda: dict(settings),
            to_json_string=lambda: json.dumps(settings, indent=2),
        )
        self._state, self._control = TrainerState(max_steps=job.num_steps), TrainerControl()
        self._model = SimpleNamespace(config=job.model.config)
        self._finish: Callable[..., None] | None = None

    def __call__(self, event: str, *, step: int | None = None, failed: bool = False, **given: Any) -> None:
        self._state.global_step = self._state.global_step if step is None else step
        getattr(self._callback, event)(self._arguments, self._state, self._control, model=self._model, **given)
        if event == "on_train_end" and self._finish is not None:
            self._finish(exit_code=int(failed))

    @cached_property
    def _callback(self) -> Any:
        if self._name == "wandb":
            import wandb  # pyright: ignore[reportMissingImports]

            self._finish = wandb.finish if wandb.run is None else None  # the callback leaves the run open
        return _callback_of(self._name, str(self._output / TENSORBOARD), self._first_step)


def _callback_of(name: str, tensorboard: str, first_step: int) -> Any:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if name != "tensorboard":
        return INTEGRATION_TO_CALLBACK[name]()
    from torch.utils.tensorboard import SummaryWriter

    folder = os.path.expanduser(os.environ.get("TENSORBOARD_LOGGING_DIR", tensorboard))
    return INTEGRATION_TO_CALLBACK[name](SummaryWriter(folder, purge_step=first_step))  # drops repeated steps
