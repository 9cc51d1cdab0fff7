"""Writes a state as a folder of slices, at once or beside the next steps.

A rank copies its slices to the host and writes them in a thread. Its progress is among the numbers that ranks share at
a step's end; when all are done, rank 0 writes the manifest and renames the folder. If a rank fails there is no new
folder, and an earlier one stays. A rank needs host memory for a copy of its slices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lengthwise.checkpoint.manifest import Manifest, fields_of_state
from lengthwise.checkpoint.optimizer_state import state_of
from lengthwise.checkpoint.part import Kept, take_digests, write_part, wrong_numbers
from lengthwise.checkpoint.saved_folder import begin, commit
from lengthwise.comm import Transport, share_first, share_names, share_numbers
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.faults import fault
from lengthwise.core.files import put_back, unfinished_of
from lengthwise.engine.optimizer import SlicedOptimizer

Result = TypeVar("Result")

IDLE, WRITTEN, WRITING, FAILED = 0.0, 1.0, 2.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a save. error: reason why there is no folder, None if there is one."""

    path: Path
    step: int
    error: str | None


class SliceWriter:
    """Writes this rank's part of one folder at a time. under_way: folder and step of an unfinished save, or None."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._path, self._step, self._manifest = Path(), 0, None
        self._thread: threading.Thread | None = None
        self._ended: Callable[[Ended], object] = lambda _: None
        self.under_way: list[tuple[Path, int]] = []
        self._error: str | None = None

    @property
    def progress(self) -> float:
        """Progress of this rank's part of the current save, for `settle`."""
        if self._thread is None:
            return IDLE
        if self._thread.is_alive():
            return WRITING
        return WRITTEN if self._error is None else FAILED

    def save(
        self,
        path: Path,
        step: int,
        optimizer: SlicedOptimizer,
        manifest_of: Callable[[dict[str, Any]], Manifest],
        *,
        ended: Callable[[Ended], None],
    ) -> None:
        """Finish an earlier save, copy this rank's state after `step` and begin to write it. Collective.

        manifest_of: function that makes the manifest from the fields of `Manifest`, on rank 0. ended: function that
        `settle` or `finish` calls at the end of this save.
        """
        self.finish()
        self.transport.phase = f"step {step}, checkpoint"
        self._ended = ended
        state, kept, parameters = state_of(optimizer), optimizer.kept(), optimizer.parameters
        own = {key for states in kept.values() for key, number in states.items() if number is None}
        vectors = share_names(self.transport, own)  # a rank may lack states that others have

        def manifest() -> Manifest:  # without files and states
            counts = {"step": step, "ranks": self.transport.world_size}
            return manifest_of(fields_of_state(parameters, optimizer=state, **counts))

        def copy() -> dict[str, Tensor]:
            exact = {name: each.detach().to("cpu", copy=True) for name, each in parameters.state().items()}
            return {**exact, **optimizer.vectors(vectors)}

        self._path, self._step, self._manifest, self._error = path, step, None, None
        rank, unfinished = self.transport.rank, unfinished_of(path)
        if rank == 0 and self._attempt(lambda: begin(path)) is not None:
            self._manifest = self._attempt(manifest)
        failed = self._share()  # no rank writes before the folder exists
        if FAILED not in failed and not unfinished.is_dir():
            self._error = f"no {unfinished}, which rank 0 has made: give a folder that all machines share, by one path"
        fault("checkpoint-copy", rank, step)
        copied = self._attempt(copy) if FAILED not in failed and self._error is None else None
        given, name = (unfinished, copied or {}, kept), f"checkpoint {step}"
        self._thread = threading.Thread(target=self._write, args=given, name=name)
        self._thread.start()
        self.under_way.append((path, step))

    def settle(self, progress: Sequence[float]) -> None:
        """Commit the save if all ranks have written, by the ranks' `progress`.

        Only rank 0 sees a failed commit. Collective if a rank has failed.
        """
        if self._thread is None or WRITING in progress:
            return
        failed = FAILED in progress
        if not failed:
            self._commit()
        self._end(shares=failed)

    def finish(self) -> None:
        """Wait until the save is committed or has failed, which all ranks then know. Collective."""
        if self._thread is None:
            return
        self.transport.phase = f"checkpoint of step {self._step}"
        self._thread.join()
        if FAILED not in self._share():
            self._commit()
        self._end(shares=True)  # no rank continues before rank 0 has renamed

    def close(self) -> None:
        """Wait for the thread; its files stay unfinished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _share(self) -> list[float]:
        own = FAILED if self._error is not None else self.progress
        return share_numbers(self.transport, [own])[:, 0].tolist()

    def _attempt(self, work: Callable[[], Result]) -> Result | None:
        """Return the result of `work`; keep any error, which the loop reports later."""
        try:
            return work()
        except LengthwiseError as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001
            self._error = f"{type(error).__name__}: {error}"
        return None

    def _write(self, unfinished: Path, state: Mapping[str, Tensor], kept: Kept) -> None:
        if self._error is None and state:
            self._attempt(lambda: self._write_part(unfinished, state, kept))

    def _write_part(self, unfinished: Path, state: Mapping[str, Tensor], kept: Kept) -> None:
        rank = self.transport.rank
        fault("checkpoint-write", rank, self._step)
        for name, numbers in state.items():
            if wrong := wrong_numbers(name, numbers):
                raise ValueError(f"{name} {wrong}")  # no run could resume from it
        write_part(unfinished, rank, state, kept)
        fault("checkpoint-written", rank, self._step)

    def _commit(self) -> None:
        if self._manifest is not None:
            self._attempt(partial(self._make, self._manifest))

    def _make(self, manifest: Manifest) -> None:
        files, kept = take_digests(unfinished_of(self._path), self.transport.world_size)
        fault("checkpoint-manifest", 0, self._step)
        optimizer = None if manifest.optimizer is None else replace(manifest.optimizer, states=kept)
        commit(self._path, replace(manifest, files=files, optimizer=optimizer))
        fault("checkpoint-committed", 0, self._step)

    def _end(self, *, shares: bool) -> None:
        """Call `ended`; if `shares`, with the first rank's error, which makes it collective."""
        error, self._thread, self._manifest = self._error, None, None
        self.under_way.clear()
        if shares:
            error = share_first(self.transport, {} if error is None else {"error": error}).get("error")
        if error is not None and self.transport.rank == 0:
            self._attempt(lambda: put_back(self._path))
        self._ended(Ended(path=self._path, step=self._step, error=error))
