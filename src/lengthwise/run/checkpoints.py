"""When a run saves checkpoints, which it keeps, and how it resumes from one; `SliceWriter` writes them.

A failed write is a note; three in a row end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lengthwise.checkpoint import CheckpointFolder, Ended, RunManifest, SliceWriter, differences, dtype_of, read_slices
from lengthwise.config import RunConfig
from lengthwise.core.errors import OutputError
from lengthwise.data.sampler import Position
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import MASTER_WEIGHTS
from lengthwise.run.resume import FOLDER, Resume, run_settings

_MOST_FAILURES = 3


class Checkpoints:
    """The checkpoints of one rank of a run."""

    def __init__(
        self,
        config: RunConfig,
        writer: SliceWriter,
        optimizer: SlicedOptimizer,
        *,
        data: Callable[[], str],
        lines: Callable[[], dict[str, int]],
        note: Callable[[str], None],
    ) -> None:
        self._config, self._writer, self._optimizer = config, writer, optimizer
        self._transport, self._saved = writer.transport, optimizer.parameters.saved
        self._settings, self._note, self._data, self._lines = config.checkpoint, note, data, lines
        self._folder = CheckpointFolder(config.output / FOLDER)
        self._failures = 0  # consecutive
        self._last = time.monotonic()

    @property
    def asks(self) -> float:
        """1 if a checkpoint is due by the time since the last one, else 0; rank 0's value decides."""
        minutes = self._settings.every_minutes if self._settings is not None else 0
        return float(minutes > 0 and time.monotonic() - self._last >= 60 * minutes)

    def is_due(self, step: int, *, asked: bool) -> bool:
        """Return whether a checkpoint follows `step`. asked: rank 0's `asks`, or True at the end of the run."""
        if self._settings is None:
            return False
        return asked or (self._settings.every_steps > 0 and step % self._settings.every_steps == 0)

    def save(
        self, step: int, *, first_loss: float, loss: float, skipped: int, position: Position | None = None
    ) -> None:
        """Wait for the previous checkpoint, copy this rank's state after `step`, and begin to write it. Collective.

        skipped: number of steps without an update. position: as in `RunManifest`.
        """
        assert self._settings is not None, "the run saves checkpoints"
        self._last = time.monotonic()

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

        self._writer.save(self._folder.at(step), step, self._optimizer, manifest_of, ended=self._take)
        if not self._settings.background:
            self._writer.finish()

    def _take(self, ended: Ended) -> None:
        """Remove old checkpoints after a successful write; note a failed one."""
        self._failures = self._failures + 1 if ended.error else 0
        if ended.error is None:
            if self._transport.rank == 0 and self._settings is not None:
                self._folder.keep_last(self._settings.keep_last)
            return
        self._note(f"the checkpoint after step {ended.step} was not written: {ended.error}")
        if self._failures >= _MOST_FAILURES:
            remedy = "Free or repair the disk, then train with {resume}."
            where = f"rank {self._transport.rank}, checkpoint of step {ended.step}"
            expected = f"at most {_MOST_FAILURES - 1} failed checkpoints in a row"
            raise OutputError(where, expected=expected, got=ended.error, remedy=remedy)

    def restore(self, resume: Resume) -> None:
        """Restore parameters and optimizer states from a checkpoint, after all files are checked. Collective."""
        transport, manifest, parameters = self._transport, resume.manifest, self._optimizer.parameters
        transport.phase = "reading the checkpoint"
        wrong = differences(manifest, self._saved.names, self._saved.shapes, dtype_of(parameters))
        other_data = manifest.data != self._data()
        if other_data and not resume.accepts_changes:
            wrong.append("it was trained on other data")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            got, remedy = "; ".join(wrong[:8]) + more, "Give the model and data that the run began with."
            raise OutputError(str(resume.folder), expected="a checkpoint of this run", got=got, remedy=remedy)
        remedy = "Remove this checkpoint: {resume|resuming} then takes the previous one."
        vectors = self._config.optimizer.states
        state = read_slices(transport, resume.folder, manifest, parameters, vectors, remedy=remedy)
        parameters.master_weights.copy_(state.pop(MASTER_WEIGHTS))
        kept = {} if manifest.optimizer is None else manifest.optimizer.states
        self._optimizer.take_vectors(state, updates=manifest.step - manifest.skipped, kept=kept)
        self._optimizer.publish()
        if transport.rank == 0:
            self._folder.go_back_to(resume.step)
        for each in (*resume.changes, *["the tokens of the data"] * other_data):
            self._note(f"changed since the checkpoint: {each}")
