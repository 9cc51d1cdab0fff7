"""Bringing the checkpoint that a run goes on from to this machine, where the output is a URL: once a machine.

Rank 0 chooses it; the first rank of each machine fetches what its folder does not have, and checks every byte, before
any rank changes its state. One whose bytes are not those that were written is passed over, and the one before taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lengthwise.checkpoint import CheckpointFolder, RemoteCheckpoints, check_sizes
from lengthwise.comm import Transport, World
from lengthwise.config import RunConfig
from lengthwise.core.errors import OutputError
from lengthwise.core.remote import RemoteFolder
from lengthwise.training.best import NOTE
from lengthwise.training.checkpoints import all_texts
from lengthwise.training.folder import BEST, CONFIG, COPIED
from lengthwise.training.resume import FOLDER, Resume, find_resume, told_resume
from lengthwise.training.run_files import best_at

_FETCHING, _THERE, _DAMAGED, _FAILED = 1.0, 0.0, 2.0, 3.0
_LOOK_SECONDS = 0.1


def told_and_fetched(
    found: Resume | None, config: RunConfig, world: World, transport: Transport, say: Callable[[str], None]
) -> Resume | None:
    """Return what rank 0 goes on from, whole in the folder of this machine. Collective.

    Raises:
        OutputError: it cannot be fetched, or no checkpoint is what was written.
    """
    resume = told_resume(found, config, transport)
    if config.url is None:
        return resume
    damaged, passed_over = set[int](), []
    while resume is not None:
        job = _Fetching(config.url, config, resume, world, say)
        while (states := _share(transport, job.state)).eq(_FETCHING).any():
            time.sleep(_LOOK_SECONDS)
        told = next((each for each in all_texts(transport, job.problem) if each), "")
        if (states == _FAILED).any():
            remedy = "See that the store can be reached, and that this machine has room; then start again."
            raise OutputError(config.url, expected="a checkpoint that can be fetched", got=told, remedy=remedy)
        if (states == _THERE).all():
            return resume
        damaged.add(resume.step)
        if transport.rank == 0:
            remedy = "Remove it, or leave it: the run makes it again."
            where = RemoteCheckpoints(RemoteFolder(config.url), FOLDER).place(resume.step)
            passed_over.append(OutputError(where, expected="the files that were written", got=told, remedy=remedy))
            found = find_resume(config, accept_changes=resume.accepts_changes, without=damaged)
            found = replace(found, passed_over=[*found.passed_over, *passed_over])
        resume = told_resume(found, config, transport)
    return None


def _share(transport: Transport, state: float) -> torch.Tensor:
    rows = torch.empty(transport.world_size, dtype=torch.float64)
    transport.all_gather(rows, torch.tensor([state], dtype=torch.float64))
    return rows


class _Fetching(threading.Thread):
    """The work of one rank: the first of a machine fetches the checkpoint, the first of all metrics and the like."""

    def __init__(self, url: str, config: RunConfig, resume: Resume, world: World, say: Callable[[str], None]) -> None:
        super().__init__(name="fetching a checkpoint", daemon=True)
        self._url, self._config, self._resume, self._world, self._say = url, config, resume, world, say
        self.state, self.problem = _THERE, ""
        if world.local_rank == 0:
            self.state = _FETCHING
            self.start()

    def run(self) -> None:
        """Fetch; what goes wrong is kept in words."""
        try:
            remote, manifest = RemoteFolder(self._url), self._resume.manifest
            try:
                check_sizes(self._resume.folder, manifest)  # every byte is checked before state changes
            except OutputError:
                folder = CheckpointFolder(self._config.folder / FOLDER)
                RemoteCheckpoints(remote, FOLDER).fetch(manifest, folder, self._say)
            if self._world.rank == 0:
                _fetch_files(remote, self._config.folder)
            self.state = _THERE
        except OutputError as error:
            self.problem, self.state = error.got, _DAMAGED
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks hear of it
            self.problem, self.state = f"{type(error).__name__}: {error}", _FAILED


def _fetch_files(remote: RemoteFolder, folder: Path) -> None:
    """Fetch what the run adds to, or compares with, where this machine has none of it."""
    there = remote.sizes()
    for name in COPIED:
        if name != CONFIG and name in there and not (folder / name).exists():
            unfinished = folder / f"{name}.unfinished"
            remote.fetch(name, unfinished)
            unfinished.rename(folder / name)
    if not (folder / BEST).exists() and (best := best_at(remote)) is not None:
        (folder / BEST).mkdir()
        (folder / BEST / NOTE).write_bytes(best[1])
