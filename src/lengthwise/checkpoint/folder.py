"""The checkpoints of a run: a folder a step, made under another name, synced, renamed when its manifest is written.

checkpoints/step-000050/manifest.json, rank-00000.safetensors, rank-00001.safetensors
checkpoints/step-000100.unfinished/
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lengthwise.checkpoint.manifest import NAME, Manifest, read_manifest
from lengthwise.core.errors import LengthwiseError, OutputError, Problems
from lengthwise.core.faults import fault
from lengthwise.core.files import found_at, sync

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
        names = [_COMMITTED.fullmatch(path.name) for path in self.path.iterdir() if not path.is_symlink()]
        return sorted(int(name[1]) for name in names if name)

    def begin(self, step: int) -> None:
        """Make the folder that ranks write into; one that was left there goes."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)
        self.unfinished(step).mkdir(parents=True)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and rename: from now on the checkpoint is there, whole."""
        unfinished, done = self.unfinished(manifest.step), self.at(manifest.step)
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

    def keep_last(self, number: int) -> None:
        """Remove all but the newest checkpoints."""
        for step in self.steps()[:-number]:
            shutil.rmtree(self.at(step), ignore_errors=True)

    def go_back_to(self, step: int) -> None:
        """Remove what is unfinished, and checkpoints after `step`: the run makes them again."""
        for path in self.path.glob(f"step-*{_UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.at(later), ignore_errors=True)

    def newest(self) -> tuple[Path, Manifest, list[LengthwiseError]]:
        """Return the newest whole checkpoint, and what newer ones have wrong; OutputError, Problems: there is none."""
        problems: list[LengthwiseError] = []
        for step in reversed(self.steps()):
            folder = self.at(step)
            try:
                manifest = read_manifest(folder)
                check_sizes(folder, manifest)
                return folder, manifest, problems
            except OutputError as error:
                problems.append(error)
        if not problems:
            expected, remedy = "a checkpoint to go on from", "Train without {resume|resuming}."
            raise OutputError(str(self.path), expected=expected, got="none", remedy=remedy)
        raise problems[0] if len(problems) == 1 else Problems(problems)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise OutputError for a file of a checkpoint that is not there, is a link, or has another size."""
    for name, file in manifest.files.items():
        path = folder / name
        if (found := found_at(path)) != f"{file.num_bytes} bytes":
            remedy = "Take an earlier checkpoint: remove this folder."
            raise OutputError(str(path), expected=f"{file.num_bytes} bytes", got=found, remedy=remedy)
