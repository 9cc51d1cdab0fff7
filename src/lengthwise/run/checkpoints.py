"""When a run saves a checkpoint, who writes what of it, and how a run goes on from one.

Each rank copies its state at a step's end and writes the copy in a thread while the next steps run. How far it is goes
with the numbers that ranks share at each step's end; when all are done, rank 0 writes the manifest and renames. A
failure to write is a warning, three in a row end the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lengthwise.checkpoint import (
    CheckpointFolder,
    Manifest,
    broken,
    differences,
    parameters_of,
    read_state,
    take_digests,
    unfit,
    write_part,
)
from lengthwise.comm import Transport, share_numbers
from lengthwise.config import RunConfig
from lengthwise.core import __version__
from lengthwise.core.errors import LengthwiseError, OutputError
from lengthwise.core.faults import fault
from lengthwise.data.sampler import Position
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import MASTER_WEIGHTS, Parameters
from lengthwise.run.resume import FOLDER, Resume, run_settings

IDLE, WRITTEN, WRITING, FAILED = 0.0, 1.0, 2.0, 3.0
_MOST_FAILURES = 3


class Checkpoints:
    """The checkpoints of one rank of a run. Methods marked so are collective."""

    def __init__(
        self,
        config: RunConfig,
        transport: Transport,
        parameters: Parameters,
        optimizer: SlicedOptimizer,
        *,
        data: Callable[[], str],
        lines: Callable[[], dict[str, int]],
        note: Callable[[str], None],
    ) -> None:
        self._config, self._transport, self._parameters, self._optimizer = config, transport, parameters, optimizer
        self._saved = parameters.saved
        self._asked, self._note, self._data, self._lines = config.checkpoint, note, data, lines
        self._folder = CheckpointFolder(config.output / FOLDER)
        self._step = self._failures = 0  # the step of the one under way; failures in a row
        self._losses = (0.0, 0.0)  # of the first step and of this one
        self._skipped, self._position, self._num_lines = 0, None, dict[str, int]()
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._last = time.monotonic()

    @property
    def progress(self) -> float:
        """How far this rank's part of the checkpoint under way is, for `settle`."""
        if self._thread is None:
            return IDLE
        if self._thread.is_alive():
            return WRITING
        return WRITTEN if self._error is None else FAILED

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

        `skipped`: of the steps, those without an update. `position`: as of `Manifest`.
        """
        self.finish()
        self._transport.phase = f"step {step}, checkpoint"
        self._last = time.monotonic()
        self._step, self._losses, self._skipped, self._error = step, (first_loss, loss), skipped, None
        self._position = position
        if self._transport.rank == 0:
            self._num_lines = self._lines()
            try:
                self._folder.begin(step)
            except OSError as error:
                self._error = str(error)
        self._share()  # nobody writes before the folder is there
        fault("checkpoint-copy", self._transport.rank, step)
        state = self._state()
        self._thread = threading.Thread(target=self._write, args=(step, state), name=f"checkpoint {step}")
        self._thread.start()
        assert self._asked is not None, "who saves was asked to"
        if not self._asked.background:
            self.finish()

    def settle(self, progress: Sequence[float]) -> None:
        """Commit the checkpoint under way if all ranks have written theirs; `progress` of each rank."""
        if self._thread is None or WRITING in progress:
            return
        failed = FAILED in progress
        if self._transport.rank == 0 and not failed:
            try:
                self._commit()
            except (OSError, LengthwiseError) as error:
                self._error, failed = str(error), True
        self._end(failed)

    def finish(self) -> None:
        """Wait until the checkpoint under way is committed, or has failed. Collective."""
        if self._thread is None:
            return
        self._transport.phase = f"checkpoint of step {self._step}"
        self._thread.join()
        self.settle(self._share())
        self._share()  # nobody goes on before rank 0 has renamed

    def close(self) -> None:
        """Wait for the thread; what it wrote stays unfinished."""
        if self._thread is not None:
            self._thread.join()

    def _end(self, failed: bool) -> None:
        self._thread = None
        self._failures = self._failures + 1 if failed else 0
        if not failed:
            return
        if self._transport.rank == 0:
            self._folder.abandon(self._step)
        got = self._error or "another rank failed to write"
        self._note(f"no checkpoint after step {self._step}: {got}")
        if self._failures >= _MOST_FAILURES:
            remedy = "Free or repair the disk, then train with {resume}."
            where = f"rank {self._transport.rank}, checkpoint of step {self._step}"
            raise OutputError(where, expected=f"one of {_MOST_FAILURES} checkpoints written", got=got, remedy=remedy)

    def _write(self, step: int, state: dict[str, Tensor]) -> None:
        try:
            if self._error is None:
                fault("checkpoint-write", self._transport.rank, step)
                write_part(self._folder.unfinished(step), self._transport.rank, state)
                fault("checkpoint-written", self._transport.rank, step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and says so
            self._error = f"{type(error).__name__}: {error}"

    def _commit(self) -> None:
        saved, ranks = self._saved, self._transport.world_size
        files = take_digests(self._folder.unfinished(self._step), ranks)
        fault("checkpoint-manifest", 0, self._step)
        self._folder.commit(
            Manifest(
                version=__version__,
                step=self._step,
                ranks=ranks,
                dtype=_name(self._parameters),  # pyright: ignore[reportArgumentType]
                first_loss=self._losses[0],
                loss=self._losses[1],
                skipped=self._skipped,
                position=self._position,
                lines=self._num_lines,
                run=run_settings(self._config),
                data=self._data(),
                borders=saved.layout.borders,
                ranks_per_node=saved.layout.ranks_per_node,
                stage_buckets=saved.layout.stage_buckets,
                parameters=parameters_of(saved.layout, list(saved.names), list(saved.shapes)),
                files=files,
            )
        )
        fault("checkpoint-committed", 0, self._step)
        assert self._asked is not None, "who saves was asked to"
        self._folder.keep_last(self._asked.keep_last)

    def _state(self) -> dict[str, Tensor]:
        """Return a copy of what this rank holds, on the host."""
        exact = {name: each.detach().to("cpu", copy=True) for name, each in self._parameters.state().items()}
        return {**exact, **self._optimizer.vectors()}

    def _share(self) -> list[float]:
        """Return how far each rank is. Collective."""
        return share_numbers(self._transport, [self.progress])[:, 0].tolist()

    def restore(self, resume: Resume) -> None:
        """Take parameters and moments from a checkpoint, all checked before any is changed. Collective.

        Raises:
            OutputError: a file is not what was written, or of another model: on all ranks, with the same words.
        """
        transport, manifest, parameters = self._transport, resume.manifest, self._parameters
        transport.phase = "reading the checkpoint"
        wrong = differences(manifest, self._saved.names, self._saved.shapes, _name(parameters))
        other_data = manifest.data != self._data()
        if other_data and not resume.accepts_changes:
            wrong.append("it was trained on other data")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            got, remedy = "; ".join(wrong[:8]) + more, "Give the model and data that the run began with."
            raise OutputError(str(resume.folder), expected="a checkpoint of this run", got=got, remedy=remedy)
        own = {"first": transport.rank, "every": transport.world_size}
        layout, names = parameters.layout, parameters.names
        state = self._state()
        found = broken(resume.folder, manifest, **own) or unfit(resume.folder, manifest, state, **own)
        failed = [each for each in _all_texts(transport, found or "") if each]
        if failed:
            remedy = "Remove this checkpoint: {resume|resuming} then takes the one before."
            raise OutputError(str(resume.folder), expected="the files that were written", got=failed[0], remedy=remedy)
        read_state(resume.folder, manifest, layout, names, self._saved.rank, state)
        for name, each in parameters.state().items():
            each.copy_(state.pop(name))
        self._optimizer.take_vectors(state, updates=manifest.step - manifest.skipped)
        parameters.publish()
        parameters.published()
        self._folder_is_clean(resume)
        for each in (*resume.changes, *["the tokens of the data"] * other_data):
            self._note(f"changed since the checkpoint: {each}")

    def _folder_is_clean(self, resume: Resume) -> None:
        if self._transport.rank == 0:
            self._folder.go_back_to(resume.step)


def _name(parameters: Parameters) -> str:
    return str(parameters.state()[MASTER_WEIGHTS].dtype).removeprefix("torch.")


def _all_texts(transport: Transport, text: str) -> list[str]:
    """Return the texts of all ranks, cut to 400 bytes each. Collective."""
    size = 400
    rows = torch.zeros(transport.world_size * size, dtype=torch.uint8)
    own: Any = bytearray(text.encode()[:size].ljust(size, b"\0"))
    transport.all_gather(rows, torch.frombuffer(own, dtype=torch.uint8))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows.view(-1, size)]
