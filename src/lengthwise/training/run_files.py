"""What a run keeps at its URL beside checkpoints: settings, metrics, plans, models, stacks; who writes, what goes when.

Lines that grow are written anew, whole, where they changed. A model is there once its last file is: `config.json`, or
`adapter_config.json`. The best model is in a folder of its step, `model-best/step-000050`, so that the one before stays
until a better one is whole.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from lengthwise.checkpoint import NAME as MANIFEST
from lengthwise.core.remote import RemoteFolder
from lengthwise.core.strict_json import parse_json
from lengthwise.training.best import NOTE, BestEvaluation, note_of
from lengthwise.training.folder import BEST, COPIED, LINES, MODEL, RUN_NAMES
from lengthwise.training.resume import FOLDER as CHECKPOINTS
from lengthwise.training.stacks import FOLDER as STACKS

_PLANS = "plans"
_TRIES = 3
_OPENING = ("config.json", "adapter_config.json", NOTE)  # without which nothing opens a model
_PLAN = re.compile(rf"{_PLANS}/step-(\d+)\.json\.gz")


class RunFiles:
    """The files of one run at its URL, copied by one thread of rank 0. OSError: the store failed."""

    def __init__(self, remote: RemoteFolder, folder: Path, most_log_bytes: float) -> None:
        self._remote, self._folder, self._most_log_bytes = remote, folder, most_log_bytes
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of change
        self._plans: dict[str, int] = {}  # at the URL, with their bytes
        self._best: bytes | None = None  # what the note of the best model there says

    def clear(self) -> None:
        """Remove an earlier run, and nothing else; its checkpoints' manifests first."""
        there = self._remote.sizes()
        for name in there:
            if name.startswith(f"{CHECKPOINTS}/") and name.endswith(f"/{MANIFEST}"):
                self._remote.delete(name)
        for top in {name.partition("/")[0] for name in there} & RUN_NAMES:
            self._remote.delete(top)

    def go_back_to(self, step: int) -> None:
        """Take back the model and plans after `step`, and know what else is there."""
        there = self._remote.sizes()
        if any(name.startswith(f"{MODEL}/") for name in there):
            self._remove_model(MODEL)
        for name, num_bytes in there.items():
            if (found := _PLAN.fullmatch(name)) is None:
                continue
            if int(found[1]) > step:
                self._remote.delete(name)
            else:
                self._plans[name] = num_bytes

    def copy(self) -> None:
        """Copy what changed since the last time, but no checkpoint and not the model."""
        self.copy_small()
        self._copy_plans()
        self._copy_best()

    def copy_small(self) -> None:
        """Copy settings, lines and stacks that changed since the last time."""
        for name in COPIED:
            copy = self._copy_lines if name in LINES else self._copy_file
            copy(name)
        for path in sorted((self._folder / STACKS).glob("*.txt")):
            self._copy_file(f"{STACKS}/{path.name}")

    def copy_model(self) -> None:
        """Copy the run's model: whole when this returns."""
        self._copy_folder(self._folder / MODEL, MODEL)

    def _copy_file(self, name: str) -> None:
        path = self._folder / name
        if (now := _changed(path)) is not None and self._copied.get(name) != now:
            self._remote.put(path, name)
            self._copied[name] = now

    def _copy_lines(self, name: str) -> None:
        path = self._folder / name
        now = _changed(path)
        if now is None:
            if name in self._copied:
                self._remote.delete(name)
                del self._copied[name]
        elif self._copied.get(name) != now:
            content = path.read_bytes()  # others may be added meanwhile
            self._remote.put_bytes(content[: content.rfind(b"\n") + 1], name)
            self._copied[name] = now

    def _copy_plans(self) -> None:
        for path in sorted((self._folder / _PLANS).glob("step-*.json.gz")):
            name = f"{_PLANS}/{path.name}"
            now = _changed(path)
            if now is not None and self._copied.get(name) != now:
                self._remote.put(path, name)
                self._plans[name], self._copied[name] = now[0], now
        while len(self._plans) > 1 and sum(self._plans.values()) > self._most_log_bytes:
            oldest = min(self._plans)
            self._remote.delete(oldest)
            del self._plans[oldest]

    def _copy_best(self) -> None:
        for _ in range(_TRIES):  # a better one may take its place meanwhile
            with contextlib.suppress(FileNotFoundError):
                if self._copied_best(self._folder / BEST):
                    return

    def _copied_best(self, folder: Path) -> bool:
        """Copy the best model, and remove the one before; return whether it was one model all the time."""
        note = (folder / NOTE).read_bytes()
        if note == self._best or [each.name for each in folder.iterdir()] == [NOTE]:
            return True  # the second: of a run that goes on here, which fetched the note alone
        name = f"{BEST}/step-{parse_json(note.decode())['step']:06d}"
        self._copy_folder(folder, name)
        if (folder / NOTE).read_bytes() != note:
            return False
        self._best = note
        for other in {path.rpartition("/")[0] for path in self._remote.sizes(BEST)} - {name}:
            self._remove_model(other)
        return True

    def _copy_folder(self, folder: Path, name: str) -> None:
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        last = [each for each in _OPENING if each in files]
        for each in last:
            self._remote.delete(f"{name}/{each}")
        for each in [*(each for each in files if each not in last), *last]:
            self._remote.put(folder / each, f"{name}/{each}")

    def _remove_model(self, name: str) -> None:
        for each in _OPENING:
            self._remote.delete(f"{name}/{each}")
        self._remote.delete(name)


def read_best_at(remote: RemoteFolder) -> tuple[str, BestEvaluation] | None:
    """Return the URL of the best model of a run, and what it is of; None: there is none. OSError: no answer."""
    found = best_at(remote)
    best = None if found is None else note_of(found[1])
    return None if found is None or best is None else (remote.named(found[0]), best)


def best_at(remote: RemoteFolder) -> tuple[str, bytes] | None:
    """Return the name of the best model's folder at a URL and its note; None: there is none. OSError: no answer."""
    notes = [name for name in remote.sizes(BEST) if name.endswith(f"/{NOTE}")]
    return (notes[-1].rpartition("/")[0], remote.read(notes[-1])) if notes else None


def _changed(path: Path) -> tuple[int, int] | None:
    """Return size and time of change of a file; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
