"""When a run saves a checkpoint, which it keeps, and how a run goes on from one; `SliceWriter` writes it.

A failure to write is a warning, three in a row end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lengthwise.checkpoint import (
    CheckpointFolder,
    Ended,
    RunManifest,
    SliceWriter,
    differences,
    dtype_of,
    read_slices,
)
from lengthwise.config import RunConfig
from lengthwise.core.errors import OutputError
from lengthwise.data.sampler import Position
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import MASTER_WEIGHTS
from lengthwise.run.resume import FOLDER, Resume, run_settings

_MOST_FAILURES = 3


class Checkpoints:
    """The checkpoints of one rank of a run. Methods marked so are collective."""

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
        self._asked, self._note, self._data, self._lines = config.checkpoint, note, data, lines
        self._folder = CheckpointFolder(config.output / FOLDER)
        self._failures = 0  # in a row
        self._last = time.monotonic()

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
        self, step: int, *, first_loss: float, loss: float, skipped: int, position: Position | None = None
    ) -> None:
        """Copy this rank's state after `step` and begin to write it; wait for the one before. Collective.

        `skipped`: of the steps, those without an update. `position`: as of `RunManifest`.
        """
        assert self._asked is not None, "who saves was asked to"
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
        if not self._asked.background:
            self._writer.finish()

    def _take(self, ended: Ended) -> None:
        """Keep the last of the checkpoints; say why there is none of a step."""
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

    def restore(self, resume: Resume) -> None:
        """Take parameters and moments from a checkpoint, all checked before any is changed. Collective.

        Raises:
            OutputError: a file is not what was written, or of another model: on all ranks, with the same words.
        """
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
        remedy = "Remove this checkpoint: {resume|resuming} then takes the one before."
        vectors = self._config.optimizer.states
        state = read_slices(transport, resume.folder, manifest, parameters, vectors, remedy=remedy)
        parameters.master_weights.copy_(state.pop(MASTER_WEIGHTS))
        self._optimizer.take_vectors(state, updates=manifest.step - manifest.skipped)
        parameters.publish()
        parameters.published()
        self._folder_is_clean(resume)
        for each in (*resume.changes, *["the tokens of the data"] * other_data):
            self._note(f"changed since the checkpoint: {each}")

    def _folder_is_clean(self, resume: Resume) -> None:
        if self._transport.rank == 0:
            self._folder.go_back_to(resume.step)
