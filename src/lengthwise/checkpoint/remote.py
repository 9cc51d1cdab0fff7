"""The checkpoints of a run at a URL: the files of `CheckpointFolder`, where nothing can be renamed.

A checkpoint is there once its manifest is, which comes last and goes first; files without one are none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from lengthwise.checkpoint.folder import CheckpointFolder
from lengthwise.checkpoint.manifest import NAME, Manifest, manifest_of
from lengthwise.checkpoint.part import sha256_of
from lengthwise.core.errors import OutputError
from lengthwise.core.faults import fault
from lengthwise.core.remote import RemoteFolder

_FILE = re.compile(r"(?:^|/)step-(\d{6,})/([^/]+)$")
_REMEDY = "Take an earlier checkpoint: remove this folder."


class RemoteCheckpoints:
    """All checkpoints of a run, in the folder `name` of its URL. OSError: the store failed."""

    def __init__(self, remote: RemoteFolder, name: str) -> None:
        self.remote, self._name = remote, name

    def __str__(self) -> str:
        return self.remote.named(self._name)

    def at(self, step: int) -> str:
        """Where the checkpoint after `step` is, or will be, within the URL."""
        return f"{self._name}/step-{step:06d}"

    def place(self, step: int) -> str:
        """Return the URL of a checkpoint's folder."""
        return self.remote.named(self.at(step))

    def files(self) -> dict[int, dict[str, int]]:
        """Return the files of each step with their bytes, by name, ascending; with a manifest or without."""
        found: dict[int, dict[str, int]] = {}
        for path, num_bytes in self.remote.sizes(self._name).items():
            if (name := _FILE.search(path)) is not None:
                found.setdefault(int(name[1]), {})[name[2]] = num_bytes
        return dict(sorted(found.items()))

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, ascending."""
        return [step for step, files in self.files().items() if NAME in files]

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint. OutputError: there is none, or it is broken."""
        where = f"{self.place(step)}/{NAME}"
        try:
            content = self.remote.read(f"{self.at(step)}/{NAME}")
        except FileNotFoundError:
            raise OutputError(where, expected="a checkpoint's manifest", got="none", remedy=_REMEDY) from None
        return manifest_of(content, where, step)

    def check_sizes(self, manifest: Manifest, files: Mapping[str, int]) -> None:
        """Raise OutputError for a file of a checkpoint that is not among `files`, or has another size."""
        for name, file in manifest.files.items():
            if files.get(name) != file.num_bytes:
                where, got = f"{self.place(manifest.step)}/{name}", f"{files[name]} bytes" if name in files else "none"
                raise OutputError(where, expected=f"{file.num_bytes} bytes", got=got, remedy=_REMEDY)

    def whole(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint whose files have their sizes. OutputError: they do not."""
        manifest = self.manifest(step)
        self.check_sizes(manifest, _by_name(self.remote.sizes(self.at(step))))
        return manifest

    def wrong(self, step: int) -> str | None:
        """Return which file is not what was written, and how; None: none. Reads every byte, keeps none."""
        try:
            manifest = self.manifest(step)
        except OutputError as error:
            return str(error)
        for name, file in manifest.files.items():
            try:
                found = self.remote.digest(f"{self.at(manifest.step)}/{name}")
            except FileNotFoundError:
                return f"{self.place(manifest.step)}/{name}: none"
            if found != file.sha256:
                return self._other(manifest, name, found)
        return None

    def put_files(self, folder: Path, step: int, names: Collection[str]) -> None:
        """Copy files of a checkpoint that is in `folder`."""
        for name in names:
            self.remote.put(folder / name, f"{self.at(step)}/{name}")

    def commit(self, folder: Path, manifest: Manifest) -> None:
        """Copy the manifest of a checkpoint whose files are all there: from now on it is one.

        Raises:
            OutputError: a file is not there.
        """
        self.check_sizes(manifest, _by_name(self.remote.sizes(self.at(manifest.step))))
        fault("upload-manifest", 0, manifest.step)
        self.remote.put_bytes((folder / NAME).read_bytes(), f"{self.at(manifest.step)}/{NAME}")
        fault("upload-committed", 0, manifest.step)

    def keep_only(self, wanted: Callable[[list[int]], Collection[int]]) -> None:
        """Remove all steps but those that `wanted` returns of the committed ones, which it is given, ascending."""
        files = self.files()
        kept = set(wanted([step for step, names in files.items() if NAME in names]))
        for step in set(files) - kept:
            self.remote.delete(f"{self.at(step)}/{NAME}")
            self.remote.delete(self.at(step))

    def fetch(self, manifest: Manifest, into: CheckpointFolder, say: Callable[[str], None]) -> None:
        """Let a checkpoint be in a folder of this machine, whole, every byte checked; what is there is not fetched.

        Raises:
            OutputError: a file is not what was written.
        """
        step, unfinished = manifest.step, into.unfinished(manifest.step)
        into.begin(step)
        missing = []
        for name, file in manifest.files.items():
            with contextlib.suppress(OSError):
                if not (into.at(step) / name).is_symlink() and sha256_of(into.at(step) / name) == file.sha256:
                    os.link(into.at(step) / name, unfinished / name)
                    continue
            missing.append(name)
        if missing:
            num_bytes = sum(manifest.files[name].num_bytes for name in missing)
            say(f"fetching {len(missing)} files, {num_bytes / 1e6:,.1f} MB, of {self.place(step)}")
        for name in missing:
            found = self.remote.fetch(f"{self.at(step)}/{name}", unfinished / name)
            if found != manifest.files[name].sha256:
                into.abandon(step)
                got = self._other(manifest, name, found)
                raise OutputError(self.place(step), expected="the files that were written", got=got, remedy=_REMEDY)
        into.commit(manifest)

    def _other(self, manifest: Manifest, name: str, found: str) -> str:
        return f"{self.place(manifest.step)}/{name}: SHA-256 {found[:16]}..., not {manifest.files[name].sha256[:16]}..."


def _by_name(sizes: Mapping[str, int]) -> dict[str, int]:
    return {path.rpartition("/")[2]: num_bytes for path, num_bytes in sizes.items()}
