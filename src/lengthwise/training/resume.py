"""What a run goes on from: the newest checkpoint in its output folder, of the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lengthwise.checkpoint import CheckpointFolder, Manifest, changed
from lengthwise.config import RunConfig
from lengthwise.core.errors import LengthwiseError, OutputError

FOLDER = "checkpoints"  # within the output of a run

# Settings that may differ when a run goes on: they change where, when and how fast, not what is trained.
FREE_SETTINGS = frozenset(
    (
        *("capacity_tokens", "planner", "recompute", "offload", "heads", "measurements"),
        *("attention", "compile", "fused_layers", "experts", "loss", "overlap", "device", "memory_check"),
        *("eval", "checkpoint", "output"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The checkpoint that a run goes on from. `passed_over`: what newer ones have wrong."""

    folder: Path
    manifest: Manifest
    passed_over: Sequence[LengthwiseError] = ()

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.manifest.step

    @property
    def losses(self) -> tuple[float, float]:
        """The losses of the first step and of the last that is done."""
        return self.manifest.first_loss, self.manifest.loss


def run_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings of a run that decide what is trained."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in FREE_SETTINGS}


def find_resume(config: RunConfig) -> Resume:
    """Return the newest checkpoint in the run's output folder that is whole and of these settings.

    Raises:
        OutputError: there is none, or it is of other settings, which are listed.
    """
    folder, manifest, passed_over = CheckpointFolder(config.output / FOLDER).newest()
    different = changed(manifest.run, run_settings(config))
    if different:
        remedy = "Change them back, or train into another output."
        raise OutputError(str(folder), expected="the run's own settings", got="; ".join(different), remedy=remedy)
    return Resume(folder=folder, manifest=manifest, passed_over=passed_over)
