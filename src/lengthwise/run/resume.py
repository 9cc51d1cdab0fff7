"""Resuming a run from the newest checkpoint in its output folder, which must have the same settings.

Rank 0 finds the checkpoint and sends its step to the others, which read the same. torch's agent restarts all ranks with
the same command after one died; the agent's name in the output folder distinguishes this from a first start.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lengthwise.checkpoint import CheckpointFolder, RunManifest, changed, read_run_manifest
from lengthwise.comm import Transport, share_numbers
from lengthwise.config import OptimizerConfig, RunConfig
from lengthwise.core.errors import LengthwiseError, OutputError
from lengthwise.core.names import counted

FOLDER = "checkpoints"  # within the output of a run
MODEL = "model"  # the model of a finished run, in its output
EARLIER = "model.earlier"  # a file beside it: the run was resumed, and has not finished since

# Settings that may differ when a run resumes: they change where, when and how fast it trains, not what.
FREE_SETTINGS = frozenset(
    (
        *("capacity_tokens", "planner", "shard", "ranks_per_node", "stages", "virtual", "recompute", "offload"),
        *("heads", "attention", "compile", "fused_layers", "experts", "loss", "overlap", "device"),
        *("eval", "checkpoint", "save", "output", "not_finite", "report_to", "measurements"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The checkpoint that a run resumes from.

    passed_over: problems of newer checkpoints. changes: settings that differ, with both values. accepts_changes: True
    if settings and data may differ.
    """

    folder: Path
    manifest: RunManifest
    passed_over: Sequence[LengthwiseError] = ()
    changes: Sequence[str] = ()
    accepts_changes: bool = False

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.manifest.step

    @property
    def losses(self) -> tuple[float, float]:
        """(loss of the first finished step, loss of the last)."""
        return self.manifest.first_loss, self.manifest.loss

    def check_within(self, num_steps: int) -> None:
        """Raise OutputError if the checkpoint has more steps than the run."""
        if self.step > num_steps:
            expected, got = f"a checkpoint of the run's {counted(num_steps, 'step')}", f"one after {self.step}"
            remedy = "Restore steps or epochs, or train into another output."
            raise OutputError(str(self.folder), expected=expected, got=got, remedy=remedy)


_USUAL = {"train_towers": False}  # of runs of earlier versions, which had no such key


def run_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings of a run that decide what is trained."""
    given = config.model_dump(mode="json", exclude={"optimizer": {"offload"}})
    found = {key: value for key, value in given.items() if key not in FREE_SETTINGS}
    found["data"] = [_without_actors(each) for each in found["data"]]
    return found


def _without_actors(source: dict[str, object]) -> dict[str, object]:
    """Return a source's settings without its number of actors, which does not change its rows."""
    kept = {key: value for key, value in source.items() if key not in ("remote", "streaming") or value}
    return {**kept, "remote": True} if "remote" in kept else kept


def model_settings(run: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a run on which its checkpoints' parameters depend.

    With an adapter these include `seed`, which may have drawn the frozen weights.
    """
    keys = ("model", "weights", "lora", "quantization", "train_towers", "precision")
    keys += ("seed",) if run.get("lora") else ()
    run = {**_USUAL, **run}
    return {key: run.get(key) for key in keys}


def has_checkpoint(config: RunConfig) -> bool:
    """Return whether the run's output folder has a checkpoint."""
    return bool(CheckpointFolder(config.output / FOLDER).steps())


def has_model(config: RunConfig) -> bool:
    """Return whether the run's output folder has a finished run's model."""
    return (config.output / MODEL).exists()


def is_finished(config: RunConfig, resume: Resume, num_steps: int) -> bool:
    """Return whether the run has finished all its steps and saved their model."""
    return resume.step == num_steps and has_model(config) and not (config.output / EARLIER).exists()


def find_resume(config: RunConfig, *, accept_changes: bool = False) -> Resume:
    """Return the newest whole checkpoint in the run's output folder, and check its settings.

    accept_changes: True allows other settings with the same states of the optimizer. OutputError: there is no
    checkpoint, or its settings differ; the error lists them.
    """
    folder, manifest, passed_over = CheckpointFolder(config.output / FOLDER).newest()
    different = changed({**_USUAL, **manifest.run}, run_settings(config))
    if different and not accept_changes:
        remedy = "Restore them, train into another output, or give {accept_changes} to continue with these."
        raise OutputError(str(folder), expected="the run's own settings", got="; ".join(different), remedy=remedy)
    if config.lora is not None and manifest.run.get("seed") != config.seed:
        expected, got = f"seed {manifest.run.get('seed')}, which may have drawn the frozen weights", f"{config.seed}"
        remedy = "Restore `seed`; to change the order of the data, change the data."
        raise OutputError(str(folder), expected=expected, got=got, remedy=remedy)
    saved, current = _states(manifest.run.get("optimizer")), _states(config.optimizer.model_dump(mode="json"))
    if saved != current:
        remedy = "Use the earlier optimizer, or train the exported model into another output."
        raise OutputError(str(folder), expected=f"states of {current}", got=f"states of {saved}", remedy=remedy)
    return Resume(
        folder=folder, manifest=manifest, passed_over=passed_over, changes=different, accepts_changes=accept_changes
    )


def _states(optimizer: object) -> str:
    try:
        known = optimizer if isinstance(optimizer, Mapping) else {}
        config = OptimizerConfig.model_validate({k: v for k, v in known.items() if v is not None})
    except ValidationError:
        return f"an unknown optimizer, {optimizer}"
    return f"{config.name} ({', '.join(config.states) or 'none'})"


def shared_resume(found: Resume | None, config: RunConfig, transport: Transport) -> Resume | None:
    """Return the checkpoint of rank 0; torchrun's other ranks read its manifest in the shared folder. Collective."""
    if transport.world_size == 1:
        return found
    own = [0.0, 0.0] if found is None else [float(found.step), float(found.accepts_changes)]
    first = share_numbers(transport, own)[0]
    step, accepts_changes = int(first[0]), bool(first[1])
    if step == 0 or (found is not None and found.step == step):
        return found if step else None
    folder = CheckpointFolder(config.output / FOLDER).at(step)
    return Resume(folder=folder, manifest=read_run_manifest(folder), accepts_changes=accepts_changes)


def torchrun_agent() -> str | None:
    """Return the name of the agent (torchrun's, or `lengthwise train`'s) that restarts this process, or None."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    agent = os.getppid()
    try:  # with its start time, because pids are reused
        started = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        started = "?"
    return f"{socket.gethostname()}:{agent}:{started}:{run}"  # with the run, because a process may train more than once
