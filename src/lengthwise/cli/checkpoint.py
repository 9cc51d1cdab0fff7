"""`lengthwise checkpoint`: list a run's checkpoints, verify them, or export one as a model or a plain state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.cli.output import plain_console
from lengthwise.core.errors import ConfigError, OutputError
from lengthwise.core.names import counted
from lengthwise.core.sizes import read_whole
from lengthwise.report.figures import count

if TYPE_CHECKING:
    from lengthwise.checkpoint import CheckpointFolder


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """List the checkpoints of a run, verify every byte of them, or export one for other programs.

    `verify` exits with 1 if a checkpoint differs from what was written. `export` writes a run's model as a Hugging Face
    folder; of a folder of slices (`Session.save`, `checkpoints/step-000050`) it writes a plain loop's `optimizer.pt`.
    """

    action: Annotated[tyro.conf.Positional[Literal["list", "verify", "export"]], tyro.conf.arg(metavar="ACTION")]
    """list, verify or export."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """The run's output folder; verify, export: also a folder of slices."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The checkpoint saved after this step; default: verify all, export the newest."""
    to: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="TO", help_behavior_hint="")] = None
    """Export: the new folder of the model, or the new file of a plain state."""

    def run(self) -> int:
        if self.step is not None:
            read_whole("--step", self.step)
        if (self.to is not None) != (self.action == "export"):
            got, remedy = ("none", "Name a new one.") if self.to is None else (str(self.to), "Remove it.")
            raise ConfigError("TO", expected="a folder or file with export only", got=got, remedy=remedy)
        if self.action == "list" and self.step is not None:
            remedy = "Remove it, or use verify."
            raise ConfigError("--step", expected="none for list", got=str(self.step), remedy=remedy)
        return {"list": self._list, "verify": self._verify, "export": self._export}[self.action]()

    def names(self) -> dict[str, str]:
        return named_alike("step") | {"to": "TO", "resume": "lengthwise train --resume", "resume|resuming": "--resume"}

    def _is_slices(self) -> bool:
        from lengthwise.checkpoint.manifest import NAME

        return self.step is None and (self.output / NAME).exists()

    def _folder(self) -> CheckpointFolder:
        from lengthwise.checkpoint import CheckpointFolder
        from lengthwise.run.resume import FOLDER

        folder = CheckpointFolder(self.output / FOLDER)
        if not folder.steps():
            expected, remedy = "a run's output folder with checkpoints", "Train with `checkpoint: {every_steps: 50}`."
            raise OutputError(str(folder.path), expected=expected, got="none", remedy=remedy)
        return folder

    def _list(self) -> int:
        from lengthwise.checkpoint import check_sizes, read_run_manifest
        from lengthwise.report.tables import ColumnTable

        if self._print_best(alone=True):
            return 0
        folder, console, wrong = self._folder(), plain_console(), list[str]()
        rows = [("after step", "ranks", "loss", "bytes", "parameters")]
        for step in folder.steps():
            try:
                manifest = read_run_manifest(folder.at(step))
                check_sizes(folder.at(step), manifest)
            except OutputError as error:
                wrong.append(str(error))
                continue
            num_bytes = sum(file.num_bytes for file in manifest.files.values())
            entries = sum(parameter.entries for parameter in manifest.parameters)
            rows.append((str(step), str(manifest.ranks), f"{manifest.loss:.4f}", count(num_bytes), count(entries)))
        console.print(ColumnTable(rows=rows, title=f"{folder.path} (only file sizes were checked)"))
        for each in wrong:
            console.print(each)
        self._print_best()
        return int(bool(wrong))

    def _print_best(self, *, alone: bool = False) -> bool:
        """Print the best model, if one was kept. alone: True if there is no checkpoint."""
        from lengthwise.checkpoint import CheckpointFolder
        from lengthwise.run.evaluation import read_best
        from lengthwise.run.resume import FOLDER

        found = read_best(self.output)
        if found is None or (alone and CheckpointFolder(self.output / FOLDER).steps()):
            return False
        folder, best = found
        print(f"best evaluation: loss {best.loss:.4f} after step {best.step}, its model: {folder}", flush=True)
        return True

    def _verify(self) -> int:
        from lengthwise.checkpoint import broken, read_manifest

        folders, bad = self._to_verify(), 0
        for folder in folders:
            try:
                wrong = broken(folder, read_manifest(folder))
            except OutputError as error:
                wrong = str(error)
            bad += wrong is not None
            print(f"{folder}: {'whole' if wrong is None else f'DAMAGED: {wrong}'}", flush=True)
        print(f"{counted(len(folders), 'checkpoint')}, {bad or 'none'} damaged; every byte was read")
        return int(bad > 0)

    def _to_verify(self) -> list[Path]:
        """Return the folder itself if it is a checkpoint, else the checkpoints of the run in it."""
        if self._is_slices():
            return [self.output]
        folder = self._folder()
        steps = folder.steps() if self.step is None else [self.step]
        for step in steps:
            if step not in folder.steps():
                got = f"checkpoints after {', '.join(map(str, folder.steps()))}"
                expected, remedy = f"a checkpoint after step {step}", "Take another {step}."
                raise OutputError(str(folder.path), expected=expected, got=got, remedy=remedy)
        return [folder.at(step) for step in steps]

    def _export(self) -> int:
        from lengthwise.checkpoint import export_state
        from lengthwise.run.export import export_checkpoint
        from lengthwise.run.prepared_run import quiet_libraries

        quiet_libraries()
        assert self.to is not None, "checked before"
        exported = self.output
        if self._is_slices():
            export_state(self.output, self.to)
        else:
            exported = export_checkpoint(self.output, self.to, step=self.step)
        print(f"{exported} exported to {self.to}")
        return 0
