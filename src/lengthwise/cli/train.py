"""`lengthwise train`: train a model from a run file."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.core.errors import Collector
from lengthwise.core.names import counted
from lengthwise.core.sizes import MOST_RANKS, read_whole
from lengthwise.cost import is_mostly_overhead
from lengthwise.report.figures import clock, count, percent, seconds
from lengthwise.report.progress import LiveLine, PhaseLine
from lengthwise.report.tables import wrapped

if TYPE_CHECKING:
    from lengthwise.config import RunConfig
    from lengthwise.run.callbacks import EvalMetrics, FinishedStep, NotFinite, TrainResult
    from lengthwise.run.job import Job


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that `train` and `verify` share."""

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG.yaml")]
    """The run file (YAML)."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Processes to start on this machine; default: one per GPU, or 1 without GPUs. Not with torchrun."""
    set: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(name="set", metavar="a.b=value [a.b=value ...]"),
    ] = ()
    """Change a key of the run file for this run: --set optimizer.lr=1e-4 global_batch.sequences=8"""
    timeout_seconds: float = 600.0
    """How long a rank waits for another, in seconds, before the run ends with an error that names it."""

    def names(self) -> dict[str, str]:
        of_options = named_alike("ranks overwrite resume accept_changes max_restarts timeout_seconds")
        return of_options | {"overrides": "--set"}


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Train a model. Without torchrun, the command starts one process per rank; under torchrun, it uses torchrun's
    ranks."""

    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Delete an earlier run in the output folder first."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume the run in the output folder from its newest checkpoint, on any number of ranks."""
    resume_if_any: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume if there is a checkpoint, else start a new run: for jobs that a cluster restarts."""
    accept_changes: tyro.conf.FlagCreatePairsOff[bool] = False
    """With --resume: resume even if settings or data differ from the checkpoint's; prints every difference."""
    max_restarts: int = 0
    """How often to restart the ranks from the newest checkpoint after a rank died or hung. Not with torchrun."""

    def run(self) -> int:
        config = read_settings(self.config, self.set, self.ranks)

        from lengthwise.run.api import train

        changes = [f"--set {shlex.join(each for group in self.set for each in group)}"] * bool(self.set)
        changes += [f"--ranks {self.ranks}"] * (self.ranks is not None)
        command = " ".join(["lengthwise train", shlex.quote(str(self.config)), *changes, "--resume"])
        try:
            result = train(
                config,
                ranks=self.ranks,
                overwrite=self.overwrite,
                resume="if_any" if self.resume_if_any and not self.resume else self.resume,
                accept_changes=self.accept_changes,
                max_restarts=self.max_restarts,
                timeout_seconds=self.timeout_seconds,
                callbacks=[PrintedProgress(LiveLine(sys.stdout), command)],
            )
        except KeyboardInterrupt as interrupt:
            saved = str(interrupt.args[0]) if interrupt.args else "nothing was saved"
            raise KeyboardInterrupt(f"{saved}; {how_to_resume(config, command)}") from None
        return 128 + result.stopped_by if result.stopped_by == signal.SIGINT else 0


def read_settings(path: Path, overrides: Sequence[Sequence[str]], ranks: int | None) -> RunConfig:
    """Read a run file before the import of torch, which takes seconds."""
    from lengthwise.config import load_config

    problems = Collector()
    config = problems.attempt(lambda: load_config(path, [each for group in overrides for each in group]))
    if config is not None:
        return config
    problems.attempt(lambda: ranks is None or read_whole("ranks", ranks, most=MOST_RANKS))
    problems.raise_all()
    raise AssertionError("a run file that was not read has a problem")


def how_to_resume(config: RunConfig, command: str) -> str:
    """Return how to resume a stopped run, or why it has no checkpoint."""
    from lengthwise.run.resume import has_checkpoint

    if has_checkpoint(config):
        return f"resume from the newest checkpoint: {command}"
    if config.checkpoint is None:
        return "no checkpoint: the run file has no `checkpoint: {every_steps: ...}`"
    return "no checkpoint: the run ended before the first one"


_COLUMNS = (0, 11, 11, 9, 11, 6, 0)  # least characters of a step's fields, which keeps them in columns
_TIMED_STEPS = 50  # last steps, whose mean estimates the time left
_SILENT_SECONDS = 60.0  # without a line in a log
_LEARNING_STEPS = 10  # first steps, which warm up and show the ranks' speeds


class StepLines:
    """Makes the lines of a run's steps, of at most 80 columns; metrics.jsonl has more."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._before: float | None = None

    def of(self, step: FinishedStep, width: int | None) -> str:
        """Return the lines of a step on a terminal of `width` columns, or None without a terminal."""
        done = step.metrics
        now = time.monotonic()
        self._seconds.append(done.step_seconds if self._before is None else now - self._before)
        self._before = now
        left = (step.num_steps - done.step) * sum(self._seconds) / len(self._seconds)
        parts = [
            f"step {done.step:>{len(str(step.num_steps))}}/{step.num_steps}",
            f"loss {done.loss:.4f}",
            f"lr {done.lr:.2e}",
            f"grad {done.grad_norm:.3g}",
            f"{count(done.tokens_per_second)} tok/s",
            seconds(done.step_seconds),
            f"eta {clock(left)}",
        ]
        columns = " ".join(part.ljust(least) for part, least in zip(parts, _COLUMNS, strict=True))
        if width is None or len(columns) <= width:
            return columns
        lines = [parts[0]]
        for part in parts[1:]:
            if len(lines[-1]) + 1 + len(part) <= width:
                lines[-1] += f" {part}"
            else:
                lines.append(f"  {part}")
        return "\n".join(lines)


class PrintedProgress:
    """A `Callback` that prints the run's description, steps and summary."""

    def __init__(self, line: LiveLine, command: str = "") -> None:
        self._line, self._steps, self._phases = line, StepLines(), PhaseLine(line)
        self._command, self._config = command, None
        self._errors: list[float] = []

    def on_start(self, job: Job) -> None:
        self._config = job.config
        width = self._line.width
        self._line.write(wrapped(describe_job(job), width and width - 1, " " * 8))

    def on_phase(self, phase: str) -> None:
        """Print the current phase if nothing else was printed for a while."""
        self._phases.note(phase)

    def on_note(self, line: str) -> None:
        self._line.write(line)

    def on_step(self, step: FinishedStep) -> None:
        done = step.metrics
        self._line.write(self._steps.of(step, self._line.width))
        if self._line.width is None:  # a log has a line per step, and few lines in between
            self._phases.silent_seconds = _SILENT_SECONDS
        if step.is_measured and done.step > _LEARNING_STEPS:
            self._errors.append(abs(done.predicted_step_seconds / done.step_seconds - 1))
        if done.step == step.num_steps and self._errors:
            mean = percent(sum(self._errors) / len(self._errors))
            self._line.write(f"predicted seconds of steps from {_LEARNING_STEPS + 1} on were off by {mean} on average")

    def on_not_finite(self, found: NotFinite) -> None:
        """Print nothing: a note or an error follows."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        tokens = count(metrics.num_tokens)
        self._line.write(f"evaluation after step {metrics.step}: loss {metrics.loss:.4f} over {tokens} tokens")

    def on_end(self, result: TrainResult) -> None:
        self._line.write(summary(result, self._config, self._command))


def describe_job(job: Job) -> str:
    """Return a description of a run in a few lines."""
    from lengthwise.data.survey import named, rows_without_loss

    data, config = job.known, job.config
    skipped = "".join(f", {number} left out ({reason})" for reason, number in data.skipped.items())
    start = "its weights" if job.model.weights else f"fresh weights from seed {config.seed}"
    most = getattr(job.model.text, "max_position_embeddings", None)
    longest, beyond = int(data.lengths.max()), ""
    if most and longest > most:
        beyond = f"note    {longest} tokens are beyond the model's max_position_embeddings of {most}: "
        beyond += "it was not trained on such positions; shorten the rows, or scale RoPE in its config\n"
    if job.steps.is_known and len(without := rows_without_loss(data)):
        beyond += f"note    {counted(len(without), 'row')} without any token with a loss: {named(data, without)}\n"
    processes = counted(job.ranks, "process")
    gpus = min(job.ranks, job.gpus)

    def by_default(key: str) -> str:
        return f" ({job.chosen[key]})" if key in job.chosen else " (default)" * (key not in config.model_fields_set)

    rows = f"{counted(len(data.ids), 'sequence')}, {count(int(data.lengths.sum()))} tokens, longest {longest}{skipped}"
    rows += ", with images" if data.first_with_images is not None else ""
    if not job.steps.is_known:
        rows = f"raw, tokenized during training, up to {longest} tokens a sequence"
    device = f"{counted(gpus, 'GPU')} here" if gpus else f"CPU{_why_not_on_gpus(config)}"
    return (
        f"model   {job.model.name} ({job.model.config.model_type}), {start}, {config.precision}"
        f"{by_default('precision')}\n{_lora_line(config)}"
        f"data    {rows}\n{beyond}"
        f"batch   {_batch(config)}{by_default('global_batch')}\n"
        f"update  {_update(job)}\n"
        f"ranks   {processes} on {device}, planner {config.planner}{by_default('planner')}\n"
        f"memory  {_capacity(config)}{by_default('capacity_tokens')}, recompute {config.recompute}"
        f"{by_default('recompute')}, shard {config.shard}\n"
        f"output  {config.output}\n"
        f"time    {_time_line(job)}"
    )


def _batch(config: RunConfig) -> str:
    sequences, tokens = config.global_batch.sequences, config.global_batch.tokens
    return f"{counted(sequences, 'sequence')} a step" if sequences else f"up to {count(tokens or 0)} tokens a step"


_HIGH_RATE = 1e-4  # for all parameters of a pretrained model


def _update(job: Job) -> str:
    optimizer, warmup = job.config.optimizer, job.warmup_steps
    high = job.model.weights and job.config.lora is None and (optimizer.lr or 0.0) > _HIGH_RATE
    said = f"{counted(warmup, 'step')} of warm-up" if warmup else "no warm-up"
    words = {"lr": "lr", "schedule": "schedule", "warmup_steps": "warm-up"}
    reasons = {job.chosen[key]: [word for word in words if word in job.chosen] for key in words if key in job.chosen}
    defaults = "".join(f" ({', '.join(words[key] for key in keys)}: {why})" for why, keys in reasons.items())
    return (
        f"{optimizer.name}, lr {optimizer.lr:g}{' (high for loaded weights: 2e-5 is usual)' * bool(high)}, "
        f"{optimizer.schedule}, {said}{defaults}"
    )


def _time_line(job: Job) -> str:
    """Return an estimate of the run's time, if the data are known."""
    if not job.steps.is_known:
        return "not estimated for rows that are read during training; each step prints the time left"
    step = job.estimated_step_seconds
    if is_mostly_overhead(step, on_gpus=bool(job.gpus)):
        return "not estimated: with so little work a step is mostly overhead; each step prints the time left"
    left = job.num_steps - (job.resume.step if job.resume is not None else 0)
    return (
        f"roughly {seconds(step)} a step, {seconds(left * step)} in all, estimated for {job.hardware}: "
        "a rough guess; each step prints the time left"
    )


def _why_not_on_gpus(config: RunConfig) -> str:
    from lengthwise.comm import built_for_gpus, has_unused_gpu

    unused = config.device == "auto" and has_unused_gpu() and not built_for_gpus()
    return ", as this build of torch has no CUDA, though the machine has a GPU" if unused else ""


def _capacity(config: RunConfig) -> str:
    measured = config.capacity_tokens == "auto"
    return "microbatches as large as memory holds" if measured else f"{config.capacity_tokens} tokens per microbatch"


def _lora_line(config: RunConfig) -> str:
    lora = config.lora
    if lora is None:
        return ""
    if lora.adapter is not None:
        return f"lora    from {lora.adapter}\n"
    return f"lora    r {lora.r}, lora_alpha {lora.lora_alpha}, on {', '.join(lora.target_modules or ())}\n"


def summary(result: TrainResult, config: RunConfig | None, command: str) -> str:
    """Return how the run ended, and the paths of its files. config: None if it was already finished."""
    if config is None or (result.num_tokens == 0 and not result.skipped):
        model = result.folder / "model"
        ended = f"already finished: {counted(result.steps, 'step')}, model in {model}"
        return f"{ended}; to train on, raise steps or epochs and add --accept-changes"
    lines = []
    if result.stopped_by is not None:
        name = signal.Signals(result.stopped_by).name
        lines.append(f"\nstopped by {name} after step {result.steps}; the model is saved")
        lines.append(how_to_resume(config, command))
    if result.skipped:
        them = f"the values that were not finite: {result.folder / 'not_finite.jsonl'}"
        lines.append(f"{counted(result.skipped, 'step')} made no update, or the update was undone; {them}")
    if not result.has_trained and not result.skipped:
        lines.append("NOTHING WAS TRAINED: in every step the learning rate or the gradient was 0")
    rate = count(result.num_tokens / result.seconds)
    opened = "peft's PeftModel.from_pretrained on the base model" if config.lora is not None else "from_pretrained"
    return "\n".join(
        [
            *lines,
            f"done    {counted(result.steps, 'step')}, {count(result.num_tokens)} tokens in {seconds(result.seconds)} "
            f"({rate} tokens/s), loss {result.first_loss:.4f} -> {result.last_loss:.4f}",
            f"model   {result.folder / 'model'} (open it with {opened})",
            f"steps   {result.folder / 'metrics.jsonl'}, ledger.jsonl, plans/",
        ]
    )
