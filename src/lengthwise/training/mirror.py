"""Copies a run's folder to the URL of its output while it trains; no step waits for it.

One checkpoint at a time, the newest that is committed when the one before is there: all ranks decide alike, by what
rank 0 says with the numbers that ranks share at each step's end. Each rank copies its files in a thread and says so in
the same way. When all have, a thread of rank 0 copies metrics, plans and the best model, then the manifest, and removes
old checkpoints. A failure is a note and tried again with what is newest then; the third in a row ends the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lengthwise.checkpoint import CheckpointFolder, RemoteCheckpoints, read_manifest
from lengthwise.comm import Transport, World
from lengthwise.config import RunConfig
from lengthwise.core.errors import OutputError, WriteError
from lengthwise.core.faults import fault
from lengthwise.core.remote import RemoteFolder, storing
from lengthwise.training.checkpoints import Checkpoints, all_texts
from lengthwise.training.folder import UPLOADED
from lengthwise.training.marker import still_owns
from lengthwise.training.resume import FOLDER
from lengthwise.training.run_files import RunFiles

NUMBERS = 5
MOST_FAILURES = 3
_BETWEEN_TRIES_SECONDS = (30.0, 300.0)
_AT_THE_END_SECONDS = 10.0  # between tries, when nothing else is to be done
_FILES_SECONDS = 300.0  # between two copies of metrics, where no checkpoint brings one
_LOOK_SECONDS = 0.1
_RENAMED_SECONDS = 0.01


class Mirror:
    """The copying of one rank. Methods marked so are collective."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        transport: Transport,
        checkpoints: Checkpoints,
        note: Callable[[str], None],
    ) -> None:
        assert config.url is not None, "of an output that is a URL"
        self._config, self._transport, self._checkpoints, self._note = config, transport, checkpoints, note
        self._has_all = world.local_size == world.world_size  # the folder has the files of all ranks
        self._remote = RemoteFolder(config.url)
        self._there = RemoteCheckpoints(self._remote, FOLDER)
        self._here = CheckpointFolder(config.folder / FOLDER)
        self._files = RunFiles(self._remote, config.folder, config.most_log_mb * 1e6)
        self._job: _Job | None = None  # this rank's files of a checkpoint
        self._rest: _Job | None = None  # of rank 0: what follows
        self._attempt = self._step = 0  # the step under way; 0: none
        self._done = 0  # the last attempt that this rank has ended (-: failed)
        self._may_begin = False  # what rank 0 said last
        self._error = ""
        self._next_try, self._copied_files = 0.0, time.monotonic()
        self._ending = self._over = False
        self.uploaded = self.failures = self.failures_in_a_row = 0

    @property
    def numbers(self) -> list[float]:
        """What this rank shares at a step's end, for `hear`: of rank 0 what it says to all, of each what it has done.

        Raises:
            WriteError: on rank 0, the third failure in a row, or another run has taken the URL.
        """
        if self._rest is not None and not self._rest.is_alive():
            error, self._rest = self._rest.error, None
            self._end(error)
        if self._job is not None and not self._job.is_alive():
            self._done = self._attempt if self._job.error is None else -self._attempt
            self._error, self._job = self._job.error or "", None
        may_begin = self._step == 0 and self._rest is None and time.monotonic() >= self._next_try
        return [*map(float, (may_begin, self._checkpoints.committed, self.uploaded, self._over, self._done))]

    def start(self, step: int) -> None:
        """On rank 0, before the first step: remove what the URL has of another run, or of after `step`.

        Raises:
            OutputError: the store failed.
        """
        with storing(self._remote.url, OutputError):
            if not step:
                self._files.clear()
            else:
                self._files.go_back_to(step)
                self.uploaded = step if self._is_there(step) else 0
                self._note_uploaded(self.uploaded)
                self._there.keep_only(lambda steps: [each for each in steps if each < step or each == self.uploaded])
            self._files.copy()

    def hear(self, rows: Tensor) -> None:
        """Go on by the numbers of all ranks, (ranks, 5). Collective where a rank failed, which all know by these.

        Raises:
            WriteError: as `numbers` does.
        """
        done = rows[:, 4].tolist()
        if self._step and all(abs(each) == self._attempt for each in done) and min(done) < 0:
            texts = all_texts(self._transport, self._error)
            error = next(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            if self._transport.rank == 0:
                self._end(error)
            self._step = 0
        self._may_begin, committed, uploaded = bool(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2])
        if self._may_begin:
            self._step = 0
            if committed not in (0, uploaded):
                self._copy(committed)
        self._checkpoints.uploading = self._step
        if self._transport.rank == 0:
            self._go_on(done)

    def written(self, step: int) -> None:
        """Copy a checkpoint that all ranks have written just now, where nothing is under way."""
        if self._may_begin and not self._step:
            self._copy(step)
            self._checkpoints.uploading = step

    def _copy(self, step: int) -> None:
        self._attempt, self._step, self._may_begin = self._attempt + 1, step, False
        self._job = _Job(lambda: self._put_own(step))

    def finish(self) -> None:
        """Wait until all of the run is at the URL, its model too. Collective.

        Raises:
            WriteError: see `hear`.
        """
        self._transport.phase = f"copying to {self._remote}"
        self._ending = True
        self._next_try = min(self._next_try, time.monotonic() + _AT_THE_END_SECONDS)
        begun = time.monotonic()
        if self._transport.rank == 0:
            self._note(f"copying what is not there yet to {self._remote}; it is whole in {self._config.folder}")
        while True:
            rows = self._share()
            if rows[0, 3]:
                break
            self.hear(rows)
            time.sleep(_LOOK_SECONDS)
        if self._transport.rank == 0:
            self._note(f"all of the run is at {self._remote}, {time.monotonic() - begun:.1f} s later")

    def _share(self) -> Tensor:
        rows = torch.empty(self._transport.world_size * NUMBERS, dtype=torch.float64)
        self._transport.all_gather(rows, torch.tensor(self.numbers, dtype=torch.float64))
        return rows.view(-1, NUMBERS)

    def _put_own(self, step: int) -> None:
        rank, folder = self._transport.rank, self._here.at(step)
        while self._here.unfinished(step).exists() and not folder.exists():
            time.sleep(_RENAMED_SECONDS)  # until the first rank of this machine has committed it
        fault("upload", rank, step)
        names = list(read_manifest(folder).files)
        own = names[rank :: self._transport.world_size] if self._has_all else names[rank : rank + 1]
        self._there.put_files(folder, step, own)
        fault("uploaded", rank, step)

    def _go_on(self, done: list[float]) -> None:
        """Begin on rank 0 what is next for it alone."""
        if self._rest is not None:
            return
        if self._step:
            step = self._step
            if all(each == self._attempt for each in done):
                self._rest = _Job(lambda: self._commit(step))
        elif time.monotonic() < self._next_try:
            return
        elif self._ending and not self._over and self._checkpoints.committed in (0, self.uploaded):
            self._rest = _Job(self._copy_last)
        elif time.monotonic() - self._copied_files > _FILES_SECONDS:
            self._rest = _Job(self._copy_files)

    def _commit(self, step: int) -> None:
        self._check_owner()
        self._copy_files()
        self._check_owner()
        folder = self._here.at(step)
        self._there.commit(folder, read_manifest(folder))
        kept = self._config.checkpoint.keep_last if self._config.checkpoint is not None else 1
        self._note_uploaded(step)
        self._there.keep_only(lambda steps: [each for each in steps if each <= step][-kept:])

    def _note_uploaded(self, step: int) -> None:
        (self._config.folder / UPLOADED).write_text(str(step), encoding="ascii")

    def _copy_files(self) -> None:
        self._files.copy()
        self._copied_files = time.monotonic()

    def _copy_last(self) -> None:
        self._check_owner()
        self._copy_files()
        self._files.copy_model()
        self._over = True

    def _check_owner(self) -> None:
        if not still_owns(self._remote, self._config.folder):
            raise _TakenError

    def _is_there(self, step: int) -> bool:
        """Whether a checkpoint of this machine is at the URL, too, by its manifest and sizes."""
        files = self._there.files().get(step, {})
        try:
            manifest = self._there.manifest(step)
            self._there.check_sizes(manifest, files)
            return manifest == read_manifest(self._here.at(step))
        except OutputError:
            return False

    def _end(self, error: str | None) -> None:
        """Note how an attempt ended."""
        step, self._step = self._step, 0
        if error is None:
            self.failures_in_a_row = 0
            self.uploaded = step or self.uploaded
            return
        self.failures, self.failures_in_a_row = self.failures + 1, self.failures_in_a_row + 1
        what = f"checkpoint of step {step}" if step else "files of the run"
        if self.failures_in_a_row >= MOST_FAILURES or error == str(_TakenError()):
            remedy = (
                f"All is whole in {self._config.folder}: when the store is there again, train with {{resume}} here."
            )
            expected = f"one of {MOST_FAILURES} copies to succeed, and to be the only run that writes there"
            raise WriteError(self._remote.url, expected=expected, got=f"{what}: {error}", remedy=remedy)
        wait = _AT_THE_END_SECONDS if self._ending else _BETWEEN_TRIES_SECONDS[self.failures_in_a_row - 1]
        self._next_try = time.monotonic() + wait
        self._note(f"not copied to {self._remote} yet, tried again in {wait:.0f} s: {what}: {error}")


class _TakenError(Exception):
    def __str__(self) -> str:
        return "another run has taken the URL over"


class _Job(threading.Thread):
    """A piece of work in a thread of its own, which ends with the process."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="copying to a URL", daemon=True)
        self._work, self.error = work, None
        self.start()

    def run(self) -> None:
        """Do it; what goes wrong is kept in words."""
        try:
            self._work()
        except _TakenError as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and says so
            self.error = f"{type(error).__name__}: {error}"
