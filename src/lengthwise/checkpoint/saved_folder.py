"""The folders of checkpoints: written under another name, synced, and renamed with the manifest; a run's have steps.

checkpoints/step-000050/manifest.json, rank-00000.safetensors, rank-00001.safetensors
checkpoints/step-000100.unfinished/
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lengthwise.checkpoint.manifest import NAME, Manifest, RunManifest, read_run_manifest
from lengthwise.core.errors import LengthwiseError, OutputError, Problems
from lengthwise.core.faults import fault
from lengthwise.core.files import found_at, previous_of, put_back, sync, unfinished_of

_COMMITTED = re.compile(r"step-(\d{6,})")


def begin(path: Path) -> Path:
    """Make the folder that ranks fill before it becomes `path`; remove an earlier unfinished one."""
    put_back(path)
    unfinished = unfinished_of(path)
    unfinished.mkdir(parents=True)
    return unfinished


def commit(path: Path, manifest: Manifest) -> None:
    """Write the manifest and rename the folder to `path`, where it replaces an earlier checkpoint."""
    unfinished, previous = unfinished_of(path), previous_of(path)
    (unfinished / NAME).write_text(manifest.to_json(), encoding="utf-8")
    sync(unfinished / NAME)
    sync(unfinished)
    fault("checkpoint-rename", 0, manifest.step)
    if path.exists():
        path.rename(previous)
    unfinished.rename(path)
    sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


class CheckpointFolder:
    """The checkpoints of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> Path:
        """Return the path of the checkpoint after `step`."""
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        names = [_COMMITTED.fullmatch(path.name) for path in self.path.iterdir() if not path.is_symlink()]
        return sorted(int(name[1]) for name in names if name)

    def keep_last(self, number: int) -> None:
        """Remove all but the newest checkpoints."""
        for step in self.steps()[:-number]:
            shutil.rmtree(self.at(step), ignore_errors=True)

    def go_back_to(self, step: int) -> None:
        """Remove unfinished checkpoints and those after `step`, which the run repeats."""
        for pattern in (unfinished_of(self.path / "step-*"), previous_of(self.path / "step-*")):
            for path in self.path.glob(pattern.name):
                shutil.rmtree(path, ignore_errors=True)
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.at(later), ignore_errors=True)

    def newest(self) -> tuple[Path, RunManifest, list[LengthwiseError]]:
        """Return the newest whole checkpoint and the problems of newer ones; raise them if there is none."""
        problems: list[LengthwiseError] = []
        for step in reversed(self.steps()):
            folder = self.at(step)
            try:
                manifest = read_run_manifest(folder)
                check_sizes(folder, manifest)
                return folder, manifest, problems
            except OutputError as error:
                problems.append(error)
        if not problems:
            expected, remedy = "a checkpoint to resume from", "Train without {resume|resuming}."
            raise OutputError(str(self.path), expected=expected, got="none", remedy=remedy)
        raise problems[0] if len(problems) == 1 else Problems(problems)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise OutputError if a file of a checkpoint is missing, is a link, or has another size."""
    for name, file in manifest.files.items():
        path = folder / name
        if (found := found_at(path)) != f"{file.num_bytes} bytes":
            remedy = "Take an earlier checkpoint: remove this folder."
            raise OutputError(str(path), expected=f"{file.num_bytes} bytes", got=found, remedy=remedy)
