"""What a run goes on from: the newest checkpoint in its output folder, of the same settings.

Rank 0 finds it and tells the others, which read the same. Under torchrun a rank that died makes the agent start all
ranks again, with the command of before: the agent's name in the output folder tells such a start from a first one.
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
MODEL = "model"  # of a run that has ended, in its output
EARLIER = "model.earlier"  # a file beside it: the run went on from a checkpoint, and has not ended since

# Settings that may differ when a run goes on: they change where, when and how fast, not what is trained.
FREE_SETTINGS = frozenset(
    (
        *(
            "capacity_tokens",
            "planner",
            "shard",
            "ranks_per_node",
            "stages",
            "virtual",
            "recompute",
            "offload",
            "heads",
        ),
        "measurements",
        *("attention", "compile", "fused_layers", "experts", "loss", "overlap", "device", "memory_check"),
        *("eval", "checkpoint", "save", "output", "not_finite", "report_to"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The checkpoint that a run goes on from.

    `passed_over`: what newer ones have wrong. `changes`: settings that differ, with both values, where
    `accepts_changes`, of the data, too.
    """

    folder: Path
    manifest: RunManifest
    passed_over: Sequence[LengthwiseError] = ()
    changes: Sequence[str] = ()
    accepts_changes: bool = False

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.manifest.step

    @property
    def losses(self) -> tuple[float, float]:
        """The losses of the first step and of the last that is done."""
        return self.manifest.first_loss, self.manifest.loss

    def check_within(self, num_steps: int) -> None:
        """Raise OutputError where more steps are done than the run has."""
        if self.step > num_steps:
            expected, got = f"a checkpoint of the run's {counted(num_steps, 'step')}", f"one after {self.step}"
            remedy = "Set the steps or epochs back, or train into another output."
            raise OutputError(str(self.folder), expected=expected, got=got, remedy=remedy)


def run_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings of a run that decide what is trained; where the optimizer's states are does not."""
    given = config.model_dump(mode="json", exclude={"optimizer": {"offload"}})
    found = {key: value for key, value in given.items() if key not in FREE_SETTINGS}
    found["data"] = [_without_actors(each) for each in found["data"]]
    return found


def _without_actors(source: dict[str, object]) -> dict[str, object]:
    """Return a source's settings with `remote` true or not there: how many actors read it changes nothing."""
    kept = {key: value for key, value in source.items() if key not in ("remote", "streaming") or value}
    return {**kept, "remote": True} if "remote" in kept else kept


def model_settings(run: Mapping[str, object]) -> dict[str, object]:
    """Return those of a run's settings that say what the parameters of its checkpoints mean.

    `seed` is one where only an adapter is trained: weights that are frozen may have been drawn by it.
    """
    keys = ("model", "weights", "lora", "precision", *(["seed"] if run.get("lora") else []))
    return {key: run.get(key) for key in keys}


def has_checkpoint(config: RunConfig) -> bool:
    """Whether a checkpoint was ever committed in the run's output folder."""
    return bool(CheckpointFolder(config.output / FOLDER).steps())


def has_model(config: RunConfig) -> bool:
    """Whether a run has ended in the run's output folder: a model is there."""
    return (config.output / MODEL).exists()


def is_finished(config: RunConfig, resume: Resume, num_steps: int) -> bool:
    """Whether the run has made all its steps and saved their model."""
    return resume.step == num_steps and has_model(config) and not (config.output / EARLIER).exists()


def find_resume(config: RunConfig, *, accept_changes: bool = False) -> Resume:
    """Return the newest checkpoint in the run's output folder that is whole and of these settings.

    `accept_changes`: of other settings, too, where it has the optimizer's states.

    Raises:
        OutputError: there is none, or it is of other settings, which are listed.
    """
    folder, manifest, passed_over = CheckpointFolder(config.output / FOLDER).newest()
    different = changed(manifest.run, run_settings(config))
    if different and not accept_changes:
        remedy = "Change them back, train into another output, or give {accept_changes} to go on with these."
        raise OutputError(str(folder), expected="the run's own settings", got="; ".join(different), remedy=remedy)
    if config.lora is not None and manifest.run.get("seed") != config.seed:
        expected, got = f"seed {manifest.run.get('seed')}, which may have drawn the frozen weights", f"{config.seed}"
        remedy = "Set `seed` back; the order of the data may be changed by the data alone."
        raise OutputError(str(folder), expected=expected, got=got, remedy=remedy)
    saved, asked = _states(manifest.run.get("optimizer")), _states(config.optimizer.model_dump(mode="json"))
    if saved != asked:
        remedy = "Take the optimizer of before, or train the exported model into another output."
        raise OutputError(str(folder), expected=f"states of {asked}", got=f"states of {saved}", remedy=remedy)
    return Resume(
        folder=folder, manifest=manifest, passed_over=passed_over, changes=different, accepts_changes=accept_changes
    )


def _states(optimizer: object) -> str:
    """Name an optimizer of a run's settings, and what it keeps of each entry."""
    try:
        known = optimizer if isinstance(optimizer, Mapping) else {}
        config = OptimizerConfig.model_validate({k: v for k, v in known.items() if v is not None})
    except ValidationError:
        return f"an optimizer that is not known, {optimizer}"
    return f"{config.name} ({', '.join(config.states) or 'none'})"


def shared_resume(found: Resume | None, config: RunConfig, transport: Transport) -> Resume | None:
    """Return what rank 0 goes on from; ranks of other processes read it in the shared folder. Collective.

    Raises:
        OutputError: this rank cannot read it.
    """
    if transport.world_size == 1:
        return found
    mine = [0.0, 0.0] if found is None else [float(found.step), float(found.accepts_changes)]
    first = share_numbers(transport, mine)[0]
    step, accepts_changes = int(first[0]), bool(first[1])
    if step == 0 or (found is not None and found.step == step):
        return found if step else None
    folder = CheckpointFolder(config.output / FOLDER).at(step)
    return Resume(folder=folder, manifest=read_run_manifest(folder), accepts_changes=accepts_changes)


def torchrun_agent() -> str | None:
    """Name the torchrun agent that started this process, and will again if a rank dies; None: there is none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = os.getppid()
    try:  # when it was started: numbers of processes are used again
        started = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        started = "?"
    return f"{socket.gethostname()}:{agent}:{started}"
