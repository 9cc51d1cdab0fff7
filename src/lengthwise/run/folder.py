"""The output folder of a run: its lock, its files, and the refusal to overwrite another run.

A run claims the folder with a lock on `run.lock`, which is freed however the run ends. Lines are written one by one.
The model is written into `model.unfinished`, synced and renamed, so that `model` is whole or absent. A resumed run
keeps the earlier model until its own is whole; until then `model.earlier` marks it as earlier.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from lengthwise.checkpoint import CheckpointFolder
from lengthwise.config import RunConfig, dump_config
from lengthwise.core.errors import Collector, OutputError, WriteError
from lengthwise.core.files import claim, compress_plan, put_back, replace_file, sync, whole_folder
from lengthwise.core.measurements import Measurements
from lengthwise.run.callbacks import Callback, EvalMetrics, FinishedStep, NotFinite
from lengthwise.run.lines import COUNTED, LEDGER, LINES, METRICS, OLD_LEDGER, StepLine, lines_up_to, missing_lines
from lengthwise.run.resume import EARLIER, MODEL, Resume
from lengthwise.run.resume import FOLDER as CHECKPOINTS
from lengthwise.run.trackers import TENSORBOARD

CONFIG = "config.yaml"
_AGENT = "torchrun.txt"
BEST = "model-best"  # model of the best evaluation, see `run.evaluation`
_BESTS = (BEST, f"{BEST}.unfinished", f"{BEST}.previous")
_FOLDERS = ("plans", MODEL, f"{MODEL}.unfinished", f"{MODEL}.previous", *_BESTS, CHECKPOINTS, TENSORBOARD)
_FILES = (CONFIG, _AGENT, EARLIER, "measurements.json", *LINES)
_LOCK = "run.lock"
_PLAN = re.compile(r"step-([0-9]{6,18})\.json\.gz")
_MOST_LOG_BYTES = 400e6
_BLOCK_BYTES = 4096  # least size of a file on disk


class RunFolder(Callback):
    """Writes the files of one run; every line is written at once, so that a run that dies leaves its lines.

    A failed write is a WriteError. When plans or ledger exceed `most_log_bytes`, the oldest are removed.
    """

    def __init__(
        self, path: Path, note: Callable[[str], None] = lambda _line: None, *, most_log_bytes: float = _MOST_LOG_BYTES
    ) -> None:
        self.path, self._note = path, note
        self._most_log_bytes = most_log_bytes
        self._plans: deque[tuple[Path, int]] = deque()  # (path, bytes), the oldest first
        self._plan_bytes = 0
        self._num_lines: dict[str, int] = dict.fromkeys(COUNTED, 0)

    @property
    def model(self) -> Path:
        """Path of the trained model."""
        return self.path / MODEL

    @contextlib.contextmanager
    def saying_what_was_saved(self) -> Iterator[None]:
        """Add to a KeyboardInterrupt of the block, as its argument, what was saved in it."""
        before = self._saved()
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._saved_since(before)) from None

    @contextlib.contextmanager
    def claimed(self, *, overwrite: bool, resume: bool = False, inputs: Sequence[Path] = ()) -> Iterator[None]:
        """Keep other runs out of the folder inside the block; unless `resume`, call `check_free`.

        Forks of this process share the claim. A folder made for the claim is removed if nothing was written.
        """
        made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        with self.writing(OutputError):
            lock = self._lock() if self.path.is_dir() or not self.path.exists() else None
        try:
            if not resume:
                self.check_free(overwrite=overwrite, inputs=inputs)
            yield
        finally:
            if lock is not None:
                (self.path / _LOCK).unlink(missing_ok=True)
                lock.close()
            with contextlib.suppress(OSError):
                for each in made:
                    each.rmdir()

    def is_restart(self, agent: str | None) -> bool:
        """Return whether this agent is restarting the run that is in the folder."""
        try:
            return agent is not None and (self.path / _AGENT).read_text(encoding="utf-8") == agent
        except (OSError, UnicodeDecodeError):
            return False

    def note_agent(self, agent: str | None) -> None:
        """Write the agent that may restart the run, if there is one, into the folder."""
        with self.writing():
            (self.path / _AGENT).unlink(missing_ok=True)
            if agent is not None:
                (self.path / _AGENT).write_text(agent, encoding="utf-8")

    def check_free(self, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
        """Raise OutputError if the folder holds a run that may not be overwritten, or that contains an input."""
        there = [name for name in (*_FILES, *_FOLDERS) if (self.path / name).exists()]
        if self.path.exists() and not self.path.is_dir():
            raise self._refusal("a folder", "a file", "Choose another output.")
        if there and not overwrite:
            remedy = "Choose another output, or give {overwrite} to delete that run, or {resume} to continue it."
            raise self._refusal("no run in the output folder", ", ".join(there), remedy)
        for path in inputs:
            if any(path.resolve().is_relative_to((self.path / name).resolve()) for name in there):
                expected = "no input of this run among what {overwrite} deletes"
                raise self._refusal(expected, str(path), "Choose another output.")

    def start(self, config: RunConfig) -> None:
        """Delete the files of an earlier run, and no others, and write the resolved config."""
        with self.writing():
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            for name in _FOLDERS:
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            (self.path / "plans").mkdir(parents=True)
            replace_file(self.path / CONFIG, dump_config(config))

    def synced_lines(self) -> dict[str, int]:
        """Sync the files of lines to disk; return their numbers of lines, for a checkpoint."""
        for name in LINES:
            with contextlib.suppress(OSError):  # a file is missing; a failing disk shows at the next write
                sync(self.path / name)
        return dict(self._num_lines)

    def kept(self, resume: Resume) -> tuple[dict[str, list[StepLine]], dict[Path, int]]:
        """Return what a resumed run keeps: (lines up to the checkpoint by file, steps of plans by path).

        Missing lines are notes if the run accepts changes, else OutputError.
        """
        for path in (self.path / name for name in (MODEL, f"{MODEL}.unfinished", f"{MODEL}.previous", *_BESTS)):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                got = "a link" if path.is_symlink() else "a file"
                raise OutputError(str(path), expected="a folder, or none", got=got, remedy="Move it elsewhere.")
        plans = dict[Path, int]()
        for path in sorted((self.path / "plans").glob("step-*.json.gz")):
            name = _PLAN.fullmatch(path.name)
            if name is None:
                expected, remedy = "a name like step-000001.json.gz", "Move it elsewhere."
                raise OutputError(str(path), expected=expected, got=path.name, remedy=remedy)
            plans[path] = int(name[1])
        problems, lines = Collector(), dict[str, list[StepLine]]()
        for name in LINES:
            if os.path.lexists(self.path / name):
                lines[name] = problems.attempt(partial(lines_up_to, self.path / name, resume.step)) or []
        problems.raise_all()
        for name, got in missing_lines(lines, resume.manifest.lines):
            expected = f"the lines up to step {resume.step}, that of the checkpoint"
            remedy = "Put it back as it was, or give {accept_changes} to go on with the lines that are there."
            if resume.accepts_changes:
                self._note(f"changed since the checkpoint: {self.path / name}: {got}")
            else:
                problems.add(OutputError(str(self.path / name), expected=expected, got=got, remedy=remedy))
        problems.raise_all()
        return lines, plans

    def go_on(self, config: RunConfig, resume: Resume) -> None:
        """Remove everything after the checkpoint, because the run repeats it; on an error nothing is changed.

        The earlier model stays until the next one is whole.
        """
        lines, plans = self.kept(resume)
        with self.writing():
            put_back(self.model)
            if self.model.exists():
                (self.path / EARLIER).touch()
            for name, kept in lines.items():
                replace_file(self.path / name, "".join(line.text for line in kept))
            self._num_lines = {name: len(lines.get(name, ())) for name in COUNTED}
            (self.path / "plans").mkdir(exist_ok=True)
            for path, of in plans.items():
                if of > resume.step:
                    path.unlink()
                else:
                    self._count_plan(path, path.stat().st_size)
            replace_file(self.path / CONFIG, dump_config(config))

    def keep_measurements(self, found: Measurements) -> None:
        """Write the measurements made before the first step, for later runs and for plans."""
        with self.writing():
            replace_file(self.path / "measurements.json", found.to_json())

    def writing(self, kind: type[OutputError] = WriteError) -> AbstractContextManager[None]:
        """Translate a failed write inside the block to an error of this kind."""
        return writing(self.path, kind)

    @contextlib.contextmanager
    def saving(self) -> Iterator[Path]:
        """Yield a folder for the model, which `whole_folder` renames."""
        with self.writing():
            with whole_folder(self.model, replaces=True) as unfinished:
                yield unfinished
            (self.path / EARLIER).unlink(missing_ok=True)

    def on_step(self, step: FinishedStep) -> None:
        """Write a step's plan, sequences and metrics."""
        metrics = step.metrics
        name, plan = f"plans/step-{metrics.step:06d}.json.gz", compress_plan(step.plan.to_json())
        self._append(name, plan)
        self._count_plan(self.path / name, len(plan))
        self._append_row(LEDGER, {"step": metrics.step, "sequences": list(step.sequences)})
        self._drop_old()
        self._append_row(METRICS, {key: value for key, value in asdict(metrics).items() if value is not None})

    def on_not_finite(self, found: NotFinite) -> None:
        """Write a value that is not finite."""
        self._append_row("not_finite.jsonl", asdict(found))

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Write the result of an evaluation."""
        self._append_row("eval.jsonl", asdict(metrics))

    def _append_row(self, name: str, row: dict[str, object]) -> None:
        if name in self._num_lines:
            self._num_lines[name] += 1
        self._append(name, f"{json.dumps(row)}\n".encode())

    def _append(self, name: str, content: bytes) -> None:
        path = self.path / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with path.open("ab") as file:
                file.write(content)

    def _count_plan(self, path: Path, num_bytes: int) -> None:
        on_disk = max(num_bytes, _BLOCK_BYTES)
        self._plans.append((path, on_disk))
        self._plan_bytes += on_disk

    def _drop_old(self) -> None:
        """Remove the oldest plans, and the older half of the ledger, if they exceed the limit."""
        with contextlib.suppress(OSError):
            while self._plan_bytes > self._most_log_bytes and len(self._plans) > 1:
                path, num_bytes = self._plans.popleft()
                self._plan_bytes -= num_bytes
                path.unlink(missing_ok=True)
            ledger = self.path / LEDGER
            if 2 * ledger.stat().st_size > self._most_log_bytes:
                ledger.replace(self.path / OLD_LEDGER)

    def _lock(self) -> TextIO:
        self.path.mkdir(parents=True, exist_ok=True)
        return claim(self.path / _LOCK, what=str(self.path))

    def _refusal(self, expected: str, got: str, remedy: str) -> OutputError:
        return OutputError(str(self.path), expected=expected, got=got, remedy=remedy)

    def _saved(self) -> dict[Path, int]:
        """Return the times, in ns, at which the model and the checkpoints were made or renamed."""
        checkpoints = CheckpointFolder(self.path / CHECKPOINTS)
        there = [self.model, *map(checkpoints.at, checkpoints.steps())]
        return {path: path.stat().st_ctime_ns for path in there if path.exists()}

    def _saved_since(self, before: Mapping[Path, int]) -> str:
        """Describe what was saved since: the model, the newest checkpoint, or nothing."""
        there = self._saved()
        new = [path for path, changed in there.items() if before.get(path) != changed]
        if self.model in new:
            return f"the model is saved in {self.model}"
        checkpoints = [path for path in there if path != self.model]
        if not checkpoints:
            return "nothing was saved"
        return f"{'' if new else 'nothing new was saved; '}the newest checkpoint is {checkpoints[-1]}"


@contextlib.contextmanager
def writing(path: Path, kind: type[OutputError] = WriteError) -> Iterator[None]:
    """Translate a failed write inside the block to an error of this kind that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        remedy = "Free or repair the disk, or choose another output."
        raise kind(str(path), expected="a path that can be written", got=str(error), remedy=remedy) from None
