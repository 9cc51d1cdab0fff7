"""When a run saves a checkpoint, which it keeps, and how a run goes on from one; `SliceWriter` writes it.

A failure to write is a warning, three in a row end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lengthwise.checkpoint import (
    CheckpointFolder,
    Ended,
    Kept,
    RunManifest,
    SliceWriter,
    check_files,
    differences,
    dtype_of,
    read_state,
)
from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig, RunConfig
from lengthwise.core.errors import OutputError
from lengthwise.data.sampler import Position
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.run.resume import FOLDER, Resume, run_settings

_MOST_FAILURES = 3
_CLASSES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "lion": "Lion"}  # of the optimizers of a run file
_COUNTED = ("adamw", "adam")  # whose update depends on the number of the step


class Checkpoints:
    """The checkpoints of one rank of a run. Methods marked so are collective."""

    def __init__(
        self,
        config: RunConfig,
        transport: Transport,
        parameters: Parameters,
        optimizer: ShardedOptimizer,
        *,
        data: Callable[[], str],
        lines: Callable[[], dict[str, int]],
        note: Callable[[str], None],
    ) -> None:
        self._config, self._transport, self._parameters, self._optimizer = config, transport, parameters, optimizer
        self._saved = parameters.saved
        self._asked, self._note, self._data, self._lines = config.checkpoint, note, data, lines
        self._folder, self._writer = CheckpointFolder(config.output / FOLDER), SliceWriter(transport)
        self._failures = 0  # in a row
        self._last = time.monotonic()

    @property
    def progress(self) -> float:
        """How far this rank's part of the checkpoint under way is, for `settle`."""
        return self._writer.progress

    @property
    def asks(self) -> float:
        """Whether the time since the last one asks for a checkpoint; rank 0's clock counts."""
        minutes = self._asked.every_minutes if self._asked is not None else 0
        return float(minutes > 0 and time.monotonic() - self._last >= 60 * minutes)

    def is_due(self, step: int, *, asked: bool) -> bool:
        """Whether a checkpoint follows `step`; the same on all ranks where `asked`, by rank 0's `asks`, is."""
        if self._asked is None:
            return False
        return asked or (self._asked.every_steps > 0 and step % self._asked.every_steps == 0)

    def save(
        self, step: int, *, first_loss: float, loss: float, lr: float, skipped: int, position: Position | None = None
    ) -> None:
        """Copy this rank's state after `step` and begin to write it; wait for the one before. Collective.

        `lr`: of the step. `skipped`: of the steps, those without an update. `position`: as of `RunManifest`.
        """
        assert self._asked is not None, "who saves was asked to"
        self.finish()
        self._transport.phase = f"step {step}, checkpoint"
        self._last = time.monotonic()
        slices = _RunSlices(self._optimizer, self._config.optimizer, lr=lr, updates=step - skipped)

        def manifest_of(state: dict[str, Any]) -> RunManifest:
            return RunManifest(
                **state,
                first_loss=first_loss,
                loss=loss,
                skipped=skipped,
                position=position,
                lines=self._lines(),
                run=run_settings(self._config),
                data=self._data(),
            )

        self._writer.save(self._folder.at(step), step, self._parameters, slices, manifest_of)
        if not self._asked.background:
            self.finish()

    def settle(self, progress: Sequence[float]) -> None:
        """Commit the checkpoint under way if all ranks have written theirs; `progress` of each rank."""
        self._take(self._writer.settle(progress))

    def finish(self) -> None:
        """Wait until the checkpoint under way is committed, or has failed. Collective."""
        self._take(self._writer.finish())

    def close(self) -> None:
        """Wait for what writes; it stays unfinished."""
        self._writer.close()

    def _take(self, ended: Ended | None) -> None:
        """Keep the last of the checkpoints; say why there is none of a step."""
        if ended is None:
            return
        self._failures = self._failures + 1 if ended.error else 0
        if ended.error is None:
            if self._transport.rank == 0 and self._asked is not None:
                self._folder.keep_last(self._asked.keep_last)
            return
        self._note(f"no checkpoint after step {ended.step}: {ended.error}")
        if self._failures >= _MOST_FAILURES:
            remedy = "Free or repair the disk, then train with {resume}."
            where = f"rank {self._transport.rank}, checkpoint of step {ended.step}"
            expected = f"one of {_MOST_FAILURES} checkpoints written"
            raise OutputError(where, expected=expected, got=ended.error, remedy=remedy)

    def _state(self) -> dict[str, Tensor]:
        return {**self._parameters.state(), **self._optimizer.state()}

    def restore(self, resume: Resume) -> None:
        """Take parameters and moments from a checkpoint, all checked before any is changed. Collective.

        Raises:
            OutputError: a file is not what was written, or of another model: on all ranks, with the same words.
        """
        transport, manifest, parameters = self._transport, resume.manifest, self._parameters
        transport.phase = "reading the checkpoint"
        wrong = differences(manifest, self._saved.names, self._saved.shapes, dtype_of(parameters))
        other_data = manifest.data != self._data()
        if other_data and not resume.accepts_changes:
            wrong.append("it was trained on other data")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            got, remedy = "; ".join(wrong[:8]) + more, "Give the model and data that the run began with."
            raise OutputError(str(resume.folder), expected="a checkpoint of this run", got=got, remedy=remedy)
        remedy = "Remove this checkpoint: {resume|resuming} then takes the one before."
        check_files(transport, resume.folder, manifest, self._state(), remedy=remedy)
        layout, names = parameters.layout, parameters.names
        read_state(resume.folder, manifest, layout, names, self._saved.rank, self._state())
        self._optimizer.go_on_from(manifest.step - manifest.skipped)
        parameters.publish()
        parameters.published()
        self._folder_is_clean(resume)
        for each in (*resume.changes, *["the tokens of the data"] * other_data):
            self._note(f"changed since the checkpoint: {each}")

    def _folder_is_clean(self, resume: Resume) -> None:
        if self._transport.rank == 0:
            self._folder.go_back_to(resume.step)


class _RunSlices:
    """What a checkpoint takes of a run's optimizer after so many updates, the last with this rate."""

    def __init__(self, optimizer: ShardedOptimizer, config: OptimizerConfig, *, lr: float, updates: int) -> None:
        self._optimizer, self._config, self._lr, self._updates = optimizer, config, lr, updates
        self._parameters = optimizer.parameters
        self.kind = _CLASSES[config.name]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of a plain optimizer that updates as the run's does: matrices decay, vectors do not."""
        saved, config = self._parameters.saved, self._config
        members: dict[bool, list[str]] = {True: [], False: []}
        for name, shape in zip(saved.names, saved.shapes, strict=True):
            members[len(shape) >= 2].append(name)
        return [
            {
                **config.arguments,
                "lr": self._lr,
                "weight_decay": config.weight_decay if decayed else 0.0,
                "params": names,
            }
            for decayed, names in members.items()
            if names
        ]

    def kept(self) -> Kept:
        """Return what it keeps of each parameter that has entries here, all alike."""
        kept: dict[str, float | None] = dict.fromkeys(self._optimizer.state())
        if self._config.name in _COUNTED:
            kept["step"] = float(self._updates)
        layout, names = self._parameters.layout, self._parameters.names
        return {names[run.parameter]: kept for run in layout.runs(self._parameters.saved.rank)}

    def vectors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies in the host's memory of its states."""
        return {name: self._optimizer.state()[name].to("cpu", copy=True) for name in names}
