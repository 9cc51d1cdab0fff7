"""The output folder of a run: what is written where, and when an earlier run is in the way."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from lengthwise.config import RunConfig, dump_config
from lengthwise.core.errors import OutputError
from lengthwise.core.plan import Plan
from lengthwise.training.metrics import StepMetrics

_FILES = ("config.yaml", "metrics.jsonl", "ledger.jsonl", "eval.jsonl")
_FOLDERS = ("plans", "model")


class RunFolder:
    """Writes one run; every line is flushed, so a run that dies leaves what it has done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> Path:
        """Where the trained model goes."""
        return self.path / "model"

    def check_free(self, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
        """Refuse a folder that holds a run, unless it is to be overwritten and nothing of it is an input of this run.

        Raises:
            OutputError: naming what is there.
        """
        there = [name for name in (*_FILES, *_FOLDERS) if (self.path / name).exists()]
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(str(self.path), expected="a folder", got="a file", remedy="Choose another output.")
        if there and not overwrite:
            raise OutputError(
                str(self.path),
                expected="no run in the output folder",
                got=", ".join(there),
                remedy="Choose another output, or add --overwrite to delete that run.",
            )
        for path in inputs:
            inside = [name for name in there if path.resolve().is_relative_to((self.path / name).resolve())]
            if inside:
                raise OutputError(
                    str(self.path),
                    expected="no input of this run among what --overwrite deletes",
                    got=str(path),
                    remedy="Choose another output.",
                )

    def start(self, config: RunConfig) -> None:
        """Delete an earlier run's files, and nothing else, and write the resolved config."""
        with self.writing():
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            for name in _FOLDERS:
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            (self.path / "plans").mkdir(parents=True)
            (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Tell what goes wrong while files of the run are written, a full disk for example.

        Raises:
            OutputError: the files cannot be written.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OutputError(
                str(self.path),
                expected="a folder that can be written",
                got=str(error),
                remedy="Free or mend the disk, or choose another output.",
            ) from None

    def write_step(self, metrics: StepMetrics, ids: Sequence[int], plan: Plan) -> None:
        """Write one step: its metrics, its sequences, its plan."""
        with self.writing():
            (self.path / "plans" / f"step-{metrics.step:06d}.json").write_text(plan.to_json(), encoding="utf-8")
        self._append("ledger.jsonl", {"step": metrics.step, "sequences": list(ids)})
        self._append("metrics.jsonl", {key: value for key, value in asdict(metrics).items() if value is not None})

    def write_eval(self, row: dict[str, float]) -> None:
        """Write the result of one evaluation."""
        self._append("eval.jsonl", row)

    def _append(self, name: str, row: dict[str, object] | dict[str, float]) -> None:
        with self.writing(), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
