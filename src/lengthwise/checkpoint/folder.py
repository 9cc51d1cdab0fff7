"""The checkpoints of a run: a folder a step, made under another name, synced, renamed when its manifest is written.

    checkpoints/step-000050/manifest.json, rank-00000.safetensors, rank-00001.safetensors
    checkpoints/step-000100.unfinished/

A folder without `.unfinished` has every rank's file. Ranks on several machines share the folder; where the output is
a URL each machine has one, with the files of its own ranks, and all of them are at the URL (`checkpoint/remote.py`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from lengthwise.checkpoint.manifest import NAME, Manifest, read_manifest
from lengthwise.checkpoint.part import broken
from lengthwise.core.disk import sync
from lengthwise.core.errors import LengthwiseError, OutputError, Problems
from lengthwise.core.faults import fault

_COMMITTED = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished"


class CheckpointFolder:
    """All checkpoints of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> Path:
        """Where the checkpoint after `step` is, or will be."""
        return self.path / f"step-{step:06d}"

    def unfinished(self, step: int) -> Path:
        """Where ranks write before it is committed."""
        return self.path / f"step-{step:06d}{_UNFINISHED}"

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        names = [_COMMITTED.fullmatch(each.name) for each in self.path.iterdir() if not each.is_symlink()]
        return sorted(int(name[1]) for name in names if name)

    def __str__(self) -> str:
        return str(self.path)

    def place(self, step: int) -> str:
        """Return the checkpoint's folder in words."""
        return str(self.at(step))

    def whole(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint whose files have their sizes. OutputError: they do not."""
        manifest = read_manifest(self.at(step))
        check_sizes(self.at(step), manifest)
        return manifest

    def wrong(self, step: int) -> str | None:
        """Return which file is not what was written, and how; None: none. Reads every byte."""
        try:
            return broken(self.at(step), read_manifest(self.at(step)))
        except OutputError as error:
            return str(error)

    def begin(self, step: int) -> None:
        """Make the folder that ranks write into; one that was left there goes."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        self.unfinished(step).mkdir(parents=True)

    def commit(self, manifest: Manifest, *, files: Collection[str] | None = None) -> None:
        """Write the manifest and rename: from now on the checkpoint is there, whole.

        `files`: those that this folder has, of machines that do not share it; None: all.

        Raises:
            OutputError: one is not there.
        """
        unfinished, done = self.unfinished(manifest.step), self.at(manifest.step)
        check_sizes(unfinished, manifest, files, remedy="Let all machines write into one shared folder, or to a URL.")
        (unfinished / NAME).write_text(manifest.to_json(), encoding="utf-8")
        sync(unfinished / NAME)
        sync(unfinished)
        fault("checkpoint-rename", 0, manifest.step)
        if done.exists():  # of a run that went on from an earlier step
            shutil.rmtree(done)
        unfinished.rename(done)
        sync(self.path)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def keep_last(self, number: int, *, also: Collection[int] = ()) -> None:
        """Remove all but the newest checkpoints, and those of the steps `also`."""
        for step in set(self.steps()[:-number]) - set(also):
            shutil.rmtree(self.at(step), ignore_errors=True)

    def go_back_to(self, step: int) -> None:
        """Remove what is unfinished, and checkpoints after `step`: the run makes them again."""
        for each in self.path.glob(f"step-*{_UNFINISHED}"):
            shutil.rmtree(each, ignore_errors=True)
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.at(later), ignore_errors=True)

    def newest(self) -> tuple[Path, Manifest, list[LengthwiseError]]:
        """Return the newest checkpoint whose manifest can be read and whose files have their sizes.

        Also what newer ones have wrong.

        Raises:
            OutputError: there is none; Problems: there are some, and what each has wrong.
        """
        problems: list[LengthwiseError] = []
        for step in reversed(self.steps()):
            try:
                return self.at(step), self.whole(step), problems
            except OutputError as error:
                problems.append(error)
        if not problems:
            expected, remedy = "a checkpoint to go on from", "Train without {resume|resuming}."
            raise OutputError(str(self.path), expected=expected, got="none", remedy=remedy)
        raise problems[0] if len(problems) == 1 else Problems(problems)


def check_sizes(
    folder: Path,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    remedy: str = "Take an earlier checkpoint: remove this folder.",
) -> None:
    """Raise OutputError for a file of a checkpoint, or of these, that is not there, is a link, or has another size."""
    for name in manifest.files if names is None else names:
        file, path = manifest.files[name], folder / name
        try:
            found = "a link" if path.is_symlink() else f"{path.stat().st_size} bytes"
        except OSError as error:
            found = error.strerror or str(error)
        if found != f"{file.num_bytes} bytes":
            raise OutputError(str(path), expected=f"{file.num_bytes} bytes", got=found, remedy=remedy)
